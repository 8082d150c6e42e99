"""With ``install()`` every use of torch.distributed.fsdp is ours, with ``uninstall()`` torch's.

Each test runs in a process that has imported no more than torch and its DTensors, and some in a
fresh one: what was imported before, and when, is the point."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.support.programs import Launcher
from tests.support.sampling import sample

# Parts of torch that import names of torch.distributed.fsdp.
USERS = (
    *("torch.distributed.checkpoint.state_dict", "torch.distributed.checkpoint.optimizer"),
    *("torch.distributed.tensor.parallel.fsdp", "torch.distributed._composable.fsdp"),
    *("torch.distributed.optim.named_optimizer", "torch.distributed.pipelining"),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    *("torch.distributed._composable.replicate_with_fsdp", "torch._dynamo.variables.functions"),
    *("torch.distributed._tools.fsdp2_mem_tracker", "torch._dynamo.package"),
)

# What accelerate, transformers, peft, trl, lightning, verl, composer, litgpt and torch import.
NAMES = {
    "": "BackwardPrefetch CPUOffload CPUOffloadPolicy FSDPModule FlatParameter "
    "FullOptimStateDictConfig FullStateDictConfig FullyShardedDataParallel "
    "LocalOptimStateDictConfig LocalStateDictConfig MixedPrecision MixedPrecisionPolicy "
    "OffloadPolicy OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig "
    "ShardedStateDictConfig ShardingStrategy StateDictConfig StateDictSettings StateDictType "
    "UnshardHandle fully_shard register_fsdp_forward_method share_comm_ctx",
    ".api": "BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig "
    "LocalStateDictConfig MixedPrecision ShardedOptimStateDictConfig ShardedStateDictConfig "
    "ShardingStrategy StateDictType",
    ".wrap": "CustomPolicy ModuleWrapPolicy _Policy _module_wrap_policy _or_policy "
    "_recursive_wrap _wrap_module_cls_individually always_wrap_policy enable_wrap "
    "lambda_auto_wrap_policy size_based_auto_wrap_policy transformer_auto_wrap_policy wrap",
    ".fully_sharded_data_parallel": "BackwardPrefetch CPUOffload FullOptimStateDictConfig "
    "FullStateDictConfig FullyShardedDataParallel MixedPrecision OptimStateKeyType "
    "ShardedStateDictConfig ShardingStrategy StateDictType FLAT_PARAM clean_tensor_name",
    ".sharded_grad_scaler": "ShardedGradScaler",
    "._fully_shard": "FSDPModule fully_shard MixedPrecisionPolicy",
    "._fully_shard._fsdp_param_group": "FSDPParamGroup",
    "._shard_utils": "_create_chunk_sharded_tensor",
    "._fsdp_extensions": "FSDPExtensions",
}


def assert_passes(launcher: Launcher, folder: Path, program: str, *arguments: str) -> None:
    """Run Python code that prints nothing unless a check fails."""
    prelude = f"import importlib, sys, warnings\nUSERS, NAMES = {USERS!r}, {NAMES!r}\n"
    (ended,) = launcher.run(prelude + textwrap.dedent(program), [arguments], folder)
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.parametrize("when", ["first", "last"])
def test_every_name_is_ours_and_with_uninstall_torchs_again(
    when: str, launcher: Launcher, tmp_path: Path
) -> None:
    program = """
        import torch.distributed as dist
        late = sys.argv[1] == "last"
        if late:
            for name in USERS:
                importlib.import_module(name)
            from torch.distributed.fsdp import FullyShardedDataParallel as mine, fully_shard as own
            theirs = mine, own
        import fsdp_compat
        if late:
            from torch.distributed.fsdp import fully_shard as imported
            assert imported is own, "a mere import has replaced it"
        fsdp_compat.install()
        fsdp_compat.install()
        for name in USERS:
            importlib.import_module(name)
        ours = fsdp_compat.FullyShardedDataParallel, fsdp_compat.fully_shard
        if late:
            assert (mine, own) == ours
        for below, names in NAMES.items():
            module = importlib.import_module("torch.distributed.fsdp" + below)
            for name in names.split():
                value = getattr(module, name)
                if name in fsdp_compat.__all__:
                    assert value is getattr(fsdp_compat, name), f"{below}.{name}"
        from torch.distributed.fsdp import *
        assert (FullyShardedDataParallel, fully_shard) == ours
        import torch.distributed.fsdp.wrap
        assert dist.fsdp is sys.modules["torch.distributed.fsdp"]
        assert torch.distributed.fsdp.wrap.wrap is fsdp_compat.wrap.wrap
        importlib.reload(torch.distributed.fsdp)
        assert dist.fsdp.fully_shard is ours[1]
        from torch.distributed.checkpoint import state_dict
        from torch.distributed._composable.fsdp import fully_shard as composable
        assert (state_dict.FSDP, composable) == ours
        from torch._dynamo.eval_frame import OptimizedModule
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ours[0](torch.nn.Linear(2, 2))
        assert "_load_from_state_dict" in vars(OptimizedModule)

        fsdp_compat.uninstall()
        fsdp_compat.uninstall()
        assert "_load_from_state_dict" not in vars(OptimizedModule), "the class inherits it"
        import torch.distributed.fsdp as again
        assert again.FullyShardedDataParallel is not ours[0]
        assert again is dist.fsdp and again.wrap.wrap is not fsdp_compat.wrap.wrap
        assert state_dict.FSDP is again.FullyShardedDataParallel
        assert (FullyShardedDataParallel, composable) == ours, "imported meanwhile: they stay"
        import torch.distributed._composable.fsdp, torch.distributed.pipelining.stage as stage
        assert torch.distributed._composable.fsdp.fully_shard is again.fully_shard
        assert stage.FSDPModule is again.FSDPModule is again._fully_shard.FSDPModule
        if late:
            assert theirs == (mine, own) == (again.FullyShardedDataParallel, again.fully_shard)
        assert fsdp_compat.fully_shard is ours[1]

        fsdp_compat.install()
        assert state_dict.FSDP is ours[0]
    """
    assert_passes(launcher, tmp_path, program, when)


def test_reloads_keep_ours_and_only_missing_names_are_refused(
    launcher: Launcher, tmp_path: Path
) -> None:
    program = """
        import pydoc
        from importlib.util import find_spec
        import fsdp_compat
        fsdp_compat.install()
        wrapper, finders = fsdp_compat.FullyShardedDataParallel, len(sys.meta_path)
        import torch.distributed.fsdp as fsdp, torch.distributed.fsdp.api as api
        import torch.distributed.fsdp.wrap as wrap
        homes = [wrapper.__module__, fsdp_compat.ShardingStrategy.__module__]
        for module in (api, wrap, fsdp):
            assert importlib.reload(module) is module
        assert fsdp.FullyShardedDataParallel is wrapper
        assert api.ShardingStrategy is fsdp_compat.ShardingStrategy
        assert wrap.ModuleWrapPolicy is fsdp_compat.wrap.ModuleWrapPolicy
        assert homes == [wrapper.__module__, fsdp_compat.ShardingStrategy.__module__]

        for name in ("FullyShardedDataParallel", "wrap.ModuleWrapPolicy", "api"):
            full = f"torch.distributed.fsdp.{name}"
            assert pydoc.locate(full).__name__.endswith(name.rpartition(".")[2]), full
        assert "FullyShardedDataParallel" in pydoc.render_doc(f"{fsdp.__name__}.{wrapper.__name__}")
        assert find_spec("torch.distributed.fsdp.FullyShardedDataParallel") is None
        assert find_spec("torch.distributed.fsdp.api") is api.__spec__
        try:
            from torch.distributed.fsdp import missing
            assert False
        except ImportError as error:
            assert "see fsdp_compat.install(), and has no attribute 'missing'" in str(error)

        fsdp_compat.uninstall()
        assert len(sys.meta_path) < finders
        assert find_spec("torch.distributed.fsdp").origin.endswith("__init__.py")
        import torch.distributed.fsdp.api as theirs
        assert importlib.reload(theirs).ShardingStrategy is not fsdp_compat.ShardingStrategy
    """
    assert_passes(launcher, tmp_path, program)


# What is made, by how it is named.
LATE = {
    "__main__.Derived": "class Derived(torch.distributed.fsdp.FullyShardedDataParallel): pass",
    ".FullyShardedDataParallel": """
model = torch.distributed.fsdp.FullyShardedDataParallel(
    torch.nn.Linear(2, 2), device_id=torch.device("cpu"))""",
    ".FSDPLinear": "model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2))",
}


def test_what_torch_has_made_already_is_refused_by_name(launcher: Launcher, tmp_path: Path) -> None:
    """One process that forks for each case."""
    program = f"""
        import os, traceback
        import torch, torch.distributed as dist, torch.distributed.fsdp
        import fsdp_compat
        before = torch.distributed.fsdp.fully_shard
        for name, code in {LATE!r}.items():
            process = os.fork()
            if not process:
                status = 1
                try:
                    store = dist.HashStore()
                    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
                    exec(code)
                    try:
                        fsdp_compat.install()
                    except fsdp_compat.StateError as error:
                        assert name in str(error), str(error)
                        assert "python -m fsdp_compat run" in str(error)
                        assert torch.distributed.fsdp.fully_shard is before
                        status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(process, 0)[1] == 0, name
    """
    assert_passes(launcher, tmp_path, program)


def test_references_that_install_cannot_replace_build_ours_and_are_named(
    launcher: Launcher, tmp_path: Path
) -> None:
    program = """
        import functools
        import torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper, MixedPrecision
        from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard

        make = functools.partial(Wrapper, device_id=torch.device("cpu"))
        table = {"wrappers": [(Wrapper, "options")]}
        in_place = functools.partial(fully_shard, reshard_after_forward=False)
        class Config:
            wrapper = Wrapper
            options = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
                       "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        class Settings: pass
        settings = Settings()
        settings.wrapper = Wrapper
        def default(module, wrapper=Wrapper): return wrapper(module)
        def closure():
            wrapper = Wrapper
            return lambda module: wrapper(module)
        enclosed = closure()
        def made_without_a_module():
            names = {"__name__": "gone", "Wrapper": Wrapper}
            exec("class Derived(Wrapper): pass", names)
            return names["Derived"]
        Derived = made_without_a_module()

        torchs, before, dcp = Config.wrapper, dict(vars(Wrapper)), vars(torch.distributed)
        bases, code = Wrapper.__bases__, fully_shard.__code__
        own_function = in_place.func
        import fsdp_compat
        ours = fsdp_compat.FullyShardedDataParallel
        own_bases = ours.__bases__
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fsdp_compat.install()
                builders = (make, table["wrappers"][0][0], Config.wrapper, settings.wrapper,
                            default, enclosed)
                for build in builders:
                    model = build(nn.Linear(2, 2))
                    assert type(model) is ours and isinstance(model, (Wrapper, Config.wrapper))
                model = Config.wrapper(nn.Linear(2, 2), **Config.options)
                model(torch.ones(1, 2)).sum().backward()
                with Config.wrapper.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                    assert Config.wrapper.get_state_dict_type(model).state_dict_type \\
                        is fsdp_compat.StateDictType.LOCAL_STATE_DICT
                assert issubclass(ours, Config.wrapper)
                assert isinstance(in_place(nn.Linear(2, 2)), fsdp_compat.FSDPModule)
                try:
                    Derived(nn.Linear(2, 2))
                    assert False
                except fsdp_compat.StateError as error:
                    assert "gone.Derived" in str(error) and "install() earlier" in str(error)
            texts = [(str(each.message), each.filename) for each in caught]
            assert len(texts) == 2, texts
            names = "make table Config settings default closure.<locals>.<lambda>"
            for name in names.split():
                assert f"__main__.{name}" in texts[0][0], (name, texts)
            assert "torch." not in texts[0][0].partition("kept")[2].partition("before")[0]
            assert "__main__.in_place" in texts[1][0], texts
            assert all(not where.endswith("kept.py") for _, where in texts)
            fsdp_compat.uninstall()
            after = vars(torchs)
            assert after.keys() == before.keys()
            assert all(after[name] is value for name, value in before.items())
            assert (torchs.__bases__, ours.__bases__) == (bases, own_bases)
            assert own_function.__code__ is code
            assert type(make(nn.Linear(2, 2))) is torchs and not issubclass(ours, torchs)
            assert type(Derived(nn.Linear(2, 2), device_id=torch.device("cpu"))) is Derived
            del model
    """
    assert_passes(launcher, tmp_path, program)


def test_an_old_torch_is_refused_and_classes_derived_from_private_ones_are_warned_of(
    launcher: Launcher, tmp_path: Path
) -> None:
    program = """
        import torch
        import fsdp_compat
        fsdp_compat.install  # loads what looks at the version
        version, torch.__version__ = torch.__version__, "2.9.1+cu128"
        try:
            fsdp_compat.install()
            assert False
        except fsdp_compat.StateError as error:
            assert "torch 2.9.1" in str(error) and "2.11 or newer" in str(error)
        assert "torch.distributed.fsdp" not in sys.modules
        torch.__version__ = version
        import torch.distributed.fsdp._common_utils as utils
        class Own(utils._FSDPState): pass
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fsdp_compat.install()
        texts = [str(each.message) for each in caught]
        assert any("__main__.Own from _FSDPState" in text for text in texts), texts
    """
    assert_passes(launcher, tmp_path, program)


def test_defects_of_clients_are_fixed_unless_that_is_declined(
    launcher: Launcher, tmp_path: Path
) -> None:
    program = """
        import fsdp_compat
        def watched():
            return {getattr(each, "name", "").partition(".")[0] for each in sys.meta_path}
        clients = {"peft", "accelerate"}
        fsdp_compat.install()
        assert clients <= watched()
        fsdp_compat.install(fix_clients=False)
        assert not watched() & clients
    """
    assert_passes(launcher, tmp_path, program)


CLIENT = """
def get_peft_model_state_dict(model):
    return [name for name, _ in model.named_modules() if "lora" in name]
def set_peft_model_state_dict(it, state):
    return [name for name, _ in it.named_parameters()]
"""


@pytest.mark.parametrize("is_imported_before", [False, True])
def test_a_client_of_any_version_is_fixed_where_it_is_used(
    is_imported_before: bool, launcher: Launcher, tmp_path: Path
) -> None:
    """The client has no metadata, and is used under a name that another module has imported."""
    folder = tmp_path / "peft" / "utils"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder / "__init__.py"):
        path.write_text("from peft.utils.save_and_load import *\n")
    (folder / "save_and_load.py").write_text(CLIENT)
    is_first, is_later = "import peft", "from fsdp_compat import FSDPModule"
    first = is_first if is_imported_before else is_later
    program = f"""
        sys.path.insert(0, {str(tmp_path)!r})
        warnings.simplefilter("error")
        {first}
        import fsdp_compat, peft, torch.distributed as dist
        from fsdp_compat import FullyShardedDataParallel as FSDP
        from torch import nn
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = nn.Sequential(nn.Sequential())
        model[0].add_module("lora", nn.Linear(2, 2))
        model[0] = FSDP(model[0], use_orig_params=True)
        assert peft.get_peft_model_state_dict(model=model) == ["0.lora"]
        assert peft.set_peft_model_state_dict(model, {{}}) == ["0.lora.weight", "0.lora.bias"]
        assert "named_modules" not in vars(model)
        kept = [peft.set_peft_model_state_dict]
        fsdp_compat.uninstall()
        assert peft.set_peft_model_state_dict is kept[0].__wrapped__
    """
    assert_passes(launcher, tmp_path, program)


def test_a_fix_without_its_function_is_a_warning_and_not_called_fixed(
    launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "accelerate" / "utils").mkdir(parents=True)
    (tmp_path / "accelerate" / "utils" / "fsdp_utils.py").write_text(
        "def save_fsdp_model(model): pass\nload_fsdp_model = save_fsdp_optimizer = None\n"
    )
    program = f"""
        import logging
        sys.path.insert(0, {str(tmp_path)!r})
        from fsdp_compat import FSDPModule
        logger, logged = logging.getLogger("fsdp_compat.install"), []
        logger.setLevel(logging.INFO)
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())
        logger.addHandler(handler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import accelerate.utils.fsdp_utils
        (text,) = [str(each.message) for each in caught]
        for name in ("load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer"):
            assert name in text and not any(name in each for each in logged), (text, logged)
        assert "To do: " in text and ["save_fsdp_model fixed" in each for each in logged] == [True]
    """
    assert_passes(launcher, tmp_path, program)


def test_threads_may_install_and_uninstall_at_once(launcher: Launcher, tmp_path: Path) -> None:
    program = """
        import threading
        import torch.distributed.fsdp as before
        import fsdp_compat
        failed = []
        def toggle():
            try:
                for _ in range(2):
                    fsdp_compat.install()
                    fsdp_compat.uninstall()
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=toggle) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failed, failed
        import torch.distributed.fsdp as after
        assert after is before
    """
    assert_passes(launcher, tmp_path, program)


PROGRAM = """
import sys
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
assert __name__ == "__main__"
print(FullyShardedDataParallel.__module__, sys.argv[1:])
"""


RUN = """
import os, runpy, sys
os.chdir(sys.argv.pop(1))
os.environ["FSDP_COMPAT_LOG"] = "install"
runpy.run_module("fsdp_compat", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("as_module", sample([False, True], 1))
def test_run_starts_a_program_with_ours_and_logs_what_it_reads(
    as_module: bool, launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text("from helper import PROGRAM\nexec(PROGRAM)\n")
    (tmp_path / "helper.py").write_text(f"PROGRAM = {PROGRAM!r}")
    target = ["-m", "program"] if as_module else ["program.py"]
    (ran,) = launcher.run(RUN, [[tmp_path, "run", *target, "--lr", "-m"]], tmp_path)
    assert ran.out == "fsdp_compat.fully_sharded_data_parallel ['--lr', '-m']\n", ran
    assert "modules replaced: torch.distributed.fsdp, " in ran.err
    read = (
        "private name torch.distributed.fsdp._common_utils.clean_tensor_name is read (<string>:4)"
    )
    assert read in ran.err
