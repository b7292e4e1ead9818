"""Each state has one owner: nobody else assigns it, once it is constructed."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from sources import MODULES, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ACTORS = ("kvtier.core.", "kvtier.engine.", "kvtier.tier.", "kvtier.hosts.", "kvtier.runtime")
CONTRACT = {
    "self._backend.on_lost",
    "self._backend.on_wanted",
    "self._backend.on_wanted_no_more",
    "self._backend.on_connection",
}
"""What the protocol says that the runtime sets."""


def assigned_of(tree: ast.AST) -> list[ast.Attribute]:
    """Return all attributes that are assigned. Counting up (``+=``) is what counts are for."""
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            each = target.elts if isinstance(target, ast.Tuple) else [target]
            found += [part for part in each if isinstance(part, ast.Attribute)]
    return found


def test_nobody_assigns_what_another_object_owns() -> None:
    """Through an attribute of one's own, that is; whoever wires objects passes them on."""
    through = [
        f"{module}, line {target.lineno}: {ast.unparse(target)}"
        for module in sorted(MODULES)
        if module.startswith(ACTORS)
        for target in assigned_of(tree_of(MODULES[module]))
        if isinstance(target.value, ast.Attribute) or module == "kvtier.runtime"
        if ast.unparse(target.value) != "self" and ast.unparse(target) not in CONTRACT
    ]
    assert not through


GIVEN = {
    "kvtier.plugin_api.threads: _write_with_gil.argtypes": "ctypes",
    "kvtier_backends.disk.fallocate: _fallocate.argtypes": "ctypes",
    "kvtier_backends.fs.access_times: _futimens.argtypes": "ctypes",
    "kvtier.tools.answering: process.returncode": "subprocess: nobody waits for the process",
    "kvtier.tier.cell: self._backend.on_lost": "the backend's protocol: the runtime sets it",
    "kvtier.tier.cell: self._backend.on_wanted": "as above",
    "kvtier.tier.cell: self._backend.on_wanted_no_more": "as above",
    "kvtier.tier.cell: self._backend.on_connection": "as above",
    "kvtier.tier.backend_driver: backend.store_turns": "as above",
    "kvtier.testing._workbench: backend.on_lost": "as above: the suite plays the runtime",
    "kvtier_backends.redis.client: made.ssl_context": "the client library: one for all connections",
    "kvtier.testing._workbench: backend.on_connection": "as above",
    "kvtier_backends.s3.library_threads: call.cancelled": "asyncio: what the library asks its call",
    "kvtier.tools.bench.tier_sides: self._backend.on_connection": "as above: the benchmark does",
    "kvtier.vllm.hosted.connections: connection.close": "vLLM's tier has no other place for it",
    "kvtier.vllm.hosted.connections: control._open_connection": "as above",
    "kvtier.vllm.hosted.connections: tier._get_hash_seed": "as above",
    "kvtier.tools.bench.plain_mooncake: self._placement.replica_num": "Mooncake's own settings",
    "kvtier_backends.mooncake.client: self._pinned.with_hard_pin": "Mooncake's own settings",
    "kvtier_backends.mooncake.client: self._placement.replica_num": "as above",
    "kvtier_backends.mooncake.client: self._placement.soft_pin_action": "as above",
    "kvtier_backends.memory: block.buffer": "the backend's protocol: bytes to be filled",
    "kvtier.plugin_api.slot_memory: finalizer.atexit": "weakref: not at the process's exit",
    "kvtier.plugin_api.threads: finalizer.atexit": "as above",
    "kvtier.vllm.identity.adapters: request.kvtier_adapter": "vLLM's request carries what it is "
    "hashed by",
    "kvtier.vllm.plugin: arguments.create_engine_config": "front ends without statistics are asked "
    "nothing",
    "kvtier.vllm.identity.media: plain.kvtier_is_clients": "vLLM's request carries what it is "
    "hashed by",
    "kvtier.vllm.identity.media: feature.identifier": "as above",
    "kvtier.vllm.identity.media: request.mm_features": "in transit from vLLM's front end, which "
    "is not told",
    "kvtier.vllm.scheduler.request_report: request.kv_transfer_params": "vLLM's answers to a "
    "prompt share the mapping, so another takes its place",
    "kvtier.vllm.identity.media: Request.from_engine_core_request": "vLLM does not say where ids "
    "are from",
    "kvtier.vllm.identity.media: ProcessorInputs.get_mm_hashes": "as above",
    "kvtier.vllm.identity.media: InputProcessor.process_inputs": "as above",
    "kvtier.vllm.identity.media: kv_cache_utils.generate_block_hash_extra_keys": "as above",
    "kvtier.vllm.identity.adapters: EngineCore.add_lora": "vLLM tells nobody that an adapter is "
    "loaded",
    "kvtier.vllm.identity.adapters: EngineCore.remove_lora": "as above",
    "kvtier.vllm.workarounds.gauges: OffloadPromMetrics.__init__": "vLLM 0.32 takes no mode",
    "kvtier.vllm.workarounds.idle: EngineCoreProc.has_work": "vLLM tells nobody that it waits",
    "kvtier.vllm.identity.adapters: kv_cache_utils.generate_block_hash_extra_keys": "nor asks "
    "anybody",
    "kvtier.vllm.identity.weight_updates: engine.kvtier_weights": "what is known of it goes with "
    "the engine",
    "kvtier.vllm.identity.weight_updates: EngineCore.step": "vLLM tells no manager that weights "
    "change",
    "kvtier.vllm.identity.weight_updates: EngineCore.step_with_batch_queue": "as above",
    "kvtier.vllm.identity.weight_updates: EngineCore.collective_rpc": "as above",
    "kvtier.vllm.identity.weight_updates: EngineCore.reset_prefix_cache": "as above",
    "kvtier.vllm.identity.weight_updates: EngineCore.set_weight_version": "as above",
    "kvtier.vllm.identity.weight_updates: EngineCore.sleep": "as above",
    "kvtier.vllm.workarounds.connector_hooks: SchedulerOffloadConfig.from_spec": "vLLM's manager "
    "is not told",
    "kvtier.vllm.workarounds.connector_hooks: "
    "OffloadingConnectorScheduler.get_num_new_matched_tokens": "as above",
    "kvtier.vllm.workarounds.connector_hooks: "
    "OffloadingConnectorScheduler.request_finished": "as above",
    "kvtier.vllm.workarounds.connector_hooks: "
    "OffloadingConnectorScheduler.build_connector_meta": "as above",
    "kvtier.vllm.workarounds.connector_hooks: "
    "OffloadingConnectorWorker.register_kv_caches": "nor is a worker",
    "kvtier.vllm.workarounds.connector_hooks: spec.extra_config": "vLLM's connector reads it",
    "kvtier.plugin_api.options: error.key": "an exception, annotated where it is raised",
    "kvtier.plugin_api.options: error.misspelt": "as above",
}
"""What is written from outside because who declares it wants it so."""


def declared_in(tree: ast.AST) -> set[str]:
    """Return the attributes that the classes of a module declare, or assign to ``self``."""
    nodes = [
        node for each in ast.walk(tree) if isinstance(each, ast.ClassDef) for node in ast.walk(each)
    ]
    own = {
        target.attr
        for target, _ in written_of(tree)
        if ast.unparse(target.value) in {"self", "cls"}
    }
    fields = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    return own | {field.id for field in fields if isinstance(field, ast.Name)}


def written_of(tree: ast.AST) -> Iterator[tuple[ast.Attribute, bool]]:
    """Yield all attributes that are assigned or deleted, in whole or at an index.

    With it, whether that is a count that goes up: whoever counts may do so.
    """
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                is_count = isinstance(node, ast.AugAssign) and isinstance(part, ast.Attribute)
                inner = part
                while isinstance(inner, ast.Subscript):
                    inner = inner.value
                if isinstance(inner, ast.Attribute):
                    yield inner, is_count


def written_from_outside() -> dict[str, list[int]]:
    """Return what is written elsewhere than where it is declared, and in which lines."""
    found: dict[str, list[int]] = {}
    for module, path in MODULES.items():
        tree = tree_of(path)
        declared = declared_in(tree)
        for target, is_count in written_of(tree):
            if not is_count and target.attr not in declared:
                found.setdefault(f"{module}: {ast.unparse(target)}", []).append(target.lineno)
    return found


def test_only_the_file_of_a_class_writes_what_the_class_declares() -> None:
    """Everywhere, through whatever name; into its arrays and tables, too. Others ask by a verb."""
    found = written_from_outside()
    assert {name: lines for name, lines in found.items() if name not in GIVEN} == {}
    assert sorted(GIVEN.keys() - found.keys()) == [], "no longer so: take it off the list"
