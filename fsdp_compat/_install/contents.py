"""Every module of torch.distributed.fsdp that clients use, and the names in it."""

from __future__ import annotations

from typing import Any

from .. import api, fully_sharded_data_parallel, sharded_grad_scaler, wrap
from .._front_ends.flat import client_attributes
from .._front_ends.flat.flat_param_handle import FlatParamHandle, handles_in
from .._front_ends.fully_shard import policies as fully_shard_policies
from .._front_ends.fully_shard.fully_shard import fully_shard
from .._front_ends.fully_shard.handles import GradientReductionHandle, UnshardHandle
from .._front_ends.fully_shard.module import FSDPModule, share_comm_ctx
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


def contents() -> dict[str, dict[str, Any]]:
    """Return the names of each module, by the module's name below the package ("" for that)."""
    front_end = fully_sharded_data_parallel
    configs = {name: getattr(api, name) for name in api.__all__}
    wrapper = {
        "FullyShardedDataParallel": front_end.FullyShardedDataParallel,
        "OptimStateKeyType": front_end.OptimStateKeyType,
    }
    flat = {"FlatParameter": front_end.FlatParameter}
    policies = {
        name: getattr(wrap, name)
        for name in (
            *wrap.__all__,
            *("_Policy", "_module_wrap_policy", "_or_policy", "_recursive_wrap"),
            "_wrap_module_cls_individually",
        )
    }
    wrapping = {
        "_construct_wrap_fn": private.construct_wrap_fn,
        "_post_order_apply": private.post_order_apply,
    }
    strategy = api.ShardingStrategy
    found: dict[str, dict[str, Any]] = {
        "": {**wrapper, **configs, **flat, **fully_shard_names()},
        "api": configs,
        "wrap": {**policies, **wrapping},
        "_wrap_utils": {**policies, **wrapping},
        "fully_sharded_data_parallel": {
            **wrapper,
            **configs,
            **flat,
            "CustomPolicy": wrap.CustomPolicy,
            "FLAT_PARAM": front_end.FLAT_PARAM,
            "FSDP_PREFIX": private.FSDP_PREFIX,
            "FSDP_WRAPPED_MODULE": FSDP_WRAPPED_MODULE,
            "ModuleWrapPolicy": wrap.ModuleWrapPolicy,
            "_lazy_init": client_attributes.lazy_init,
            "clean_tensor_name": clean_name,
        },
        "sharded_grad_scaler": {"ShardedGradScaler": sharded_grad_scaler.ShardedGradScaler},
        "_common_utils": {
            "FSDP_FLATTENED": private.FSDP_FLATTENED,
            "FSDP_PREFIX": private.FSDP_PREFIX,
            "FSDP_WRAPPED_MODULE": FSDP_WRAPPED_MODULE,
            "HandleTrainingState": private.HandleTrainingState,
            "TrainingState": client_attributes.TrainingState,
            "_FSDPState": private.FSDPState,
            "_apply_to_modules": private.apply_to_modules,
            "_get_module_fsdp_state": private.module_state,
            "_get_module_fsdp_state_if_fully_sharded_module": private.module_state,
            "_get_param_to_fqns": private.names_of_params,
            "_has_fsdp_params": private.has_params,
            "_is_fsdp_flattened": private.is_flattened,
            "_module_handle": private.module_handle,
            "_named_parameters_with_duplicates": private.named_parameters_with_duplicates,
            "_set_fsdp_flattened": private.set_flattened,
            "clean_tensor_name": clean_name,
            "collect_grad_tensors": private.collect_grad_tensors,
            "replace_grad_tensors": private.replace_grad_tensors,
        },
        "_flat_param": {
            **flat,
            "FlatParamHandle": FlatParamHandle,
            "HandleShardingStrategy": strategy,
            "_FLAT_PARAM": front_end.FLAT_PARAM,
        },
        "_init_utils": {
            "HYBRID_SHARDING_STRATEGIES": [strategy.HYBRID_SHARD, strategy._HYBRID_SHARD_ZERO2],
            "NO_RESHARD_AFTER_FORWARD_STRATEGIES": (
                strategy.SHARD_GRAD_OP,
                strategy._HYBRID_SHARD_ZERO2,
            ),
            "_init_intra_and_inter_node_groups": private.node_groups,
        },
        "_runtime_utils": {
            "_lazy_init": client_attributes.lazy_init,
            "_post_backward_final_callback": private.finish_backward,
            "_post_backward_hook": private.post_backward_hook,
            "_reshard": private.reshard,
            "_root_pre_forward": client_attributes.root_pre_forward,
            "_unshard": private.unshard,
        },
        "_traversal_utils": {
            "_get_fsdp_handles": handles_in,
            "_get_fsdp_states": front_end.FullyShardedDataParallel.fsdp_modules,
            "_get_fsdp_states_with_modules": private.states_with_modules,
        },
        "_unshard_param_utils": {
            "FLAT_PARAM": front_end.FLAT_PARAM,
            "_get_module_fsdp_state": private.module_state,
            "_unshard_params": front_end.FullyShardedDataParallel.summon_full_params,
            "_unshard_params_for_summon": private.summoned,
        },
    }
    return found | {name: {} for name in _EMPTY}


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
