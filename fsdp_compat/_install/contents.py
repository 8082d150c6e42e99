"""Every module of torch.distributed.fsdp that clients use, and the names in it.

What is private is there because somebody reads it: each name has its readers beside it, and their
versions are in ``READERS``. What nobody there reads is left out."""

from __future__ import annotations

from typing import Any

from .. import api, fully_sharded_data_parallel, sharded_grad_scaler, wrap
from .._front_ends.flat.client_attributes import ClientAttributes, TrainingState
from .._front_ends.flat.flat_param_handle import FlatParamHandle, handles_in
from .._front_ends.fully_shard import policies as fully_shard_policies
from .._front_ends.fully_shard.fully_shard import fully_shard
from .._front_ends.fully_shard.handles import GradientReductionHandle, UnshardHandle
from .._front_ends.fully_shard.module import FSDPModule, share_comm_ctx
from .._front_ends.fully_shard.state import ParamGroup, ShardedModules
from .._state.units import FSDP_WRAPPED_MODULE, clean_name
from . import private_names as private

# What to use in place of a private name that has no meaning here, by module.
INSTEAD = {
    "_flat_param": "the attributes of module._handle",
    "_init_utils": "the arguments of FullyShardedDataParallel",
    "_optim_utils": "FullyShardedDataParallel.optim_state_dict and optim_state_dict_to_load",
    "_runtime_utils": "hooks of modules, and model.register_comm_hook for gradients",
    "_state_dict_utils": "FullyShardedDataParallel.state_dict_type, and hooks of state_dict()",
    "_traversal_utils": "FullyShardedDataParallel.fsdp_modules",
    "_unshard_param_utils": "FullyShardedDataParallel.summon_full_params",
}

# Modules that stay torch's: parts of torch need them, and FSDP1 does not.
KEPT = ("_fully_shard", "_fsdp_extensions", "_shard_utils")

# Empty, so that torch's files of these names are never loaded.
_EMPTY = (
    *("_debug_utils", "_dynamo_utils", "_exec_order_utils", "_limiter_utils", "_optim_utils"),
    *("_state_dict_utils", "_trace_utils"),
)

_POLICIES = ("CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy")

# Repositories: the version that was read, or the commit, or its date.
READERS = {
    "accelerate": "1.15",
    "audiocraft": "1.3",
    "Bagel": "commit 2971307",
    "composer": "0.33",
    "dinov2": "2025-08",
    "dinov3": "2026-07",
    "finetuning-scheduler": "2.14",
    "litgpt": "0.5.13",
    "OLMo": "0.6",
    "open_flamingo": "2.0.1",
    "torch": "2.11 to 2.15",
    "TransformerEngine": "2.20",
    "verl": "0.7 and 0.9",
    "Wan2.1": "2026-03",
}

# Private names, by module: what they are here, and who reads them.
PRIVATE: dict[str, dict[str, tuple[Any, str]]] = {
    "_wrap_utils": {
        "_construct_wrap_fn": (private.construct_wrap_fn, "torch"),
        "_post_order_apply": (private.post_order_apply, "torch"),
    },
    "_common_utils": {
        "FSDP_WRAPPED_MODULE": (FSDP_WRAPPED_MODULE, "torch, audiocraft, verl"),
        "HandleTrainingState": (private.HandleTrainingState, "audiocraft"),
        "TrainingState": (TrainingState, "audiocraft"),
        "_get_module_fsdp_state": (private.module_state, "TransformerEngine"),
        "_get_module_fsdp_state_if_fully_sharded_module": (private.module_state, "torch, verl"),
        "_get_param_to_fqns": (private.names_of_params, "finetuning-scheduler"),
        "_is_fsdp_flattened": (private.is_flattened, "finetuning-scheduler"),
        "_named_parameters_with_duplicates": (private.named_parameters_with_duplicates, "torch"),
        "_set_fsdp_flattened": (private.set_flattened, "torch"),
        "clean_tensor_name": (clean_name, "composer"),
        "collect_grad_tensors": (private.collect_grad_tensors, "torch"),
        "replace_grad_tensors": (private.replace_grad_tensors, "torch"),
    },
    "_flat_param": {
        "FlatParamHandle": (FlatParamHandle, "OLMo, composer"),
        "FlatParameter": (fully_sharded_data_parallel.FlatParameter, "torch"),
    },
    "_init_utils": {
        "HYBRID_SHARDING_STRATEGIES": (
            [api.ShardingStrategy.HYBRID_SHARD, api.ShardingStrategy._HYBRID_SHARD_ZERO2],
            "torch",
        ),
        "_init_intra_and_inter_node_groups": (private.node_groups, "open_flamingo"),
    },
    "_runtime_utils": {
        "_lazy_init": (private.lazy_init, "OLMo, verl"),
        "_post_backward_final_callback": (private.finish_backward, "composer"),
        "_post_backward_hook": (private.post_backward_hook, "audiocraft"),
        "_reshard": (private.reshard, "audiocraft, dinov2"),
        "_root_pre_forward": (private.root_pre_forward, "litgpt"),
    },
    "_traversal_utils": {
        "_get_fsdp_handles": (handles_in, "Bagel"),
        "_get_fsdp_states_with_modules": (private.states_with_modules, "TransformerEngine"),
    },
    "_unshard_param_utils": {
        "_get_module_fsdp_state": (private.module_state, "verl"),
        "_unshard_params_for_summon": (private.summoned, "verl"),
    },
}

# Private attributes of models, by class, and who reads or sets them.
ATTRIBUTES: dict[type, dict[str, str]] = {
    ClientAttributes: {
        "_all_handles": "verl",
        "_flat_param": "accelerate",
        "_handle": "accelerate, audiocraft, verl, Wan2.1",
        "_has_params": "accelerate",
        "_is_root": "verl",
        "_state_dict_type": "audiocraft",
    },
    FlatParamHandle: {
        "_get_padded_unsharded_flat_param": "audiocraft",
        "_offload_params": "verl",
        "_orig_param_dtype": "accelerate",
        "flat_param": "Bagel, verl, Wan2.1",
        "flat_param_to": "verl",
        "reshard": "verl",
    },
    fully_sharded_data_parallel.FlatParameter: {
        "_fqns": "accelerate, OLMo",
        "_is_flat_param": "OLMo",
        "_local_shard": "composer, verl",
        "_shapes": "OLMo",
        "_shard_param_infos": "OLMo",
    },
    ShardedModules: {
        "_fsdp_param_group": "composer, dinov3",
        "_lazy_init": "dinov3",
        "_mp_policy": "finetuning-scheduler",
        "_root_post_backward_final_callback": "torch",
        "_state_ctx": "torch",
    },
    ParamGroup: {"post_forward_mesh_info": "composer, dinov3"},
}


def contents() -> dict[str, dict[str, Any]]:
    """Return the names of each module, by the module's name below the package ("" for that)."""
    front_end = fully_sharded_data_parallel
    configs = {name: getattr(api, name) for name in api.__all__}
    wrapper = {
        "FlatParameter": front_end.FlatParameter,
        "FullyShardedDataParallel": front_end.FullyShardedDataParallel,
        "OptimStateKeyType": front_end.OptimStateKeyType,
    }
    policies = ("_Policy", "_module_wrap_policy", "_or_policy", "_recursive_wrap")
    return {
        "": {**wrapper, **configs, **fully_shard_names()},
        "api": configs,
        "wrap": {
            name: getattr(wrap, name)
            for name in (*wrap.__all__, *policies, "_wrap_module_cls_individually")
        },
        "fully_sharded_data_parallel": {
            **wrapper,
            **configs,
            "CustomPolicy": wrap.CustomPolicy,
            "FLAT_PARAM": front_end.FLAT_PARAM,
            "FSDP_PREFIX": FSDP_WRAPPED_MODULE + ".",
            "FSDP_WRAPPED_MODULE": FSDP_WRAPPED_MODULE,
            "ModuleWrapPolicy": wrap.ModuleWrapPolicy,
            "clean_tensor_name": clean_name,
        },
        "sharded_grad_scaler": {"ShardedGradScaler": sharded_grad_scaler.ShardedGradScaler},
        **{
            module: {name: value for name, (value, _) in rows.items()}
            for module, rows in PRIVATE.items()
        },
        **{module: {} for module in _EMPTY},
    }


def fully_shard_names() -> dict[str, Any]:
    """Return the names of the package that belong to ``fully_shard``."""
    return {
        **{name: getattr(fully_shard_policies, name) for name in _POLICIES},
        "FSDPModule": FSDPModule,
        "GradientReductionHandle": GradientReductionHandle,
        "UnshardHandle": UnshardHandle,
        "fully_shard": fully_shard,
        "register_fsdp_forward_method": fully_sharded_data_parallel.register_fsdp_forward_method,
        "share_comm_ctx": share_comm_ctx,
    }
