"""Turn a name into the folder of the adapter that it means, checked against the base and composed on first use.

Opens experts, checks them against the base, plans, checks the rank, and writes the result into the cache in a layout
with one rank, one scale and no patterns, which every version of every engine reads.

A server that loads an adapter of the wrong width answers with garbage, and a module that the base does not have is
ignored. Both are refused here. vLLM leaves copies of base weights out: with an expert of another base it would compute
base + ΔW, where PEFT computes copy + ΔW. They are compared once, and only if the base is a folder on this machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from adapterswap import __version__
from adapterswap.core.experts.adapter import Adapter, open_adapter
from adapterswap.core.experts.keys import copies_in
from adapterswap.core.experts.parts import compare_shapes
from adapterswap.core.model.base import Base
from adapterswap.core.model.checkpoints import open_checkpoint
from adapterswap.core.model.layers import Depth, ModelConfig, layer_container
from adapterswap.core.model.sources import FORMAT, Reference, Source, same_base
from adapterswap.core.planning.base import check_base_weights, with_chains
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.planning.rules import BASE
from adapterswap.core.planning.targets import Target
from adapterswap.core.writing.adapter import Prepared, prepare
from adapterswap.core.writing.copies import check_copies
from adapterswap.core.writing.outputs import Form
from adapterswap.engines.serving.cache import Cache, Memo, stamps_in
from adapterswap.engines.serving.names import Manifest, UnknownNameError, composition_of
from adapterswap.kit.errors import AdapterswapError, BaseModelError, ExpertError, Problems, RunError, and_more
from adapterswap.kit.files.hashes import Stamps
from adapterswap.kit.files.text import expand, read_json, shown

_SHOWN = 3  # modules named in one message
_REMEDY = "Choose the experts' base model, one that the installed transformers knows"


def base_shapes(base_model: str, memo: Memo) -> dict[str, str]:
    """Each module of the base that LoRA can adapt, with its shape in the format of `LoraModule.shape`.

    Args:
        base_model: a folder or Hub id.
        memo: stores the answer, because building even an empty model of 8B takes about a second.
    """
    folder = Source.of_base(base_model).folder
    config = read_json(folder / "config.json", _REMEDY, kind=BaseModelError)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    key = f"shapes {digest} transformers {version('transformers')}"
    stored = memo.get(key)
    if isinstance(stored, dict):
        return stored
    shapes = {name: weight.shape for name, weight in Base.at(folder, f"the base {base_model}").items()}
    memo.put(key, shapes)
    return shapes


def check_fits(adapter: Adapter, shapes: Mapping[str, str], name: str, target: Target = Target.VLLM) -> None:
    """Raise if a server with this base cannot load the adapter `name`, or would answer wrongly with it."""
    problems = Problems(ExpertError)
    with problems.collect():
        target.check_expert(adapter, name, "experts")
    remedy = "Serve experts of this base model"
    fused = [module.name for module in adapter.modules.values() if module.parameter]
    missing = [module for module in adapter.modules if module not in shapes and module not in fused]
    if missing:
        moved = [Base.exchange(module, adapter.container, layer_container(shapes)) for module in missing]
        fate, otherwise = "does not have", adapter.modules[missing[0]].misnamed or remedy
        if all(module in shapes for module in moved):
            fate = f"calls {and_more([*map(str, moved)], 1)}"
            otherwise = "Write it under the base's names with `adapterswap convert` and `names=transformers5`"
        problems.add(
            f"{name} adapts {and_more(missing, _SHOWN)}, which the base {fate}", otherwise, parameter="experts"
        )

    adapter_shapes = {module.name: module.shape for module in adapter.modules.values() if not module.parameter}
    compare_shapes(
        adapter_shapes, shapes, one=name, other="the base", remedy=remedy, problems=problems, parameter="experts"
    )
    problems.raise_if_any()


def check_served_copies(adapter: Adapter, base_model: str, memo: Memo, name: str, engine: str) -> None:
    """Compare every copy with the base's weight, up to the rounding of the narrower of their dtypes.

    Args:
        adapter: the expert.
        base_model: a folder. With a Hub id nothing is compared.
        memo: stores that they are equal, because the embedding of an 8B model has a gigabyte to read.
        name: the expert's name in messages.
        engine: the server's name in messages.
    """
    folder = expand(base_model)
    if not copies_in(adapter.file) or not os.path.isdir(folder):
        return
    try:
        base = open_checkpoint(folder)
    except AdapterswapError:  # vLLM reads more kinds of weights, and reports those that it cannot read
        return
    files = [adapter.file, *base.shards]
    key = " ".join(["copies", *(f"{os.path.realpath(file.path)} {file.stamp}" for file in files)])
    if memo.get(key):
        return
    remedy = "Serve experts of this base model"
    check_copies(name, adapter, base, effect=f"which {engine} leaves out", remedy=remedy)
    memo.put(key, True)


class _Planned(NamedTuple):
    """What is kept of a name's plan: what it does, its folder's name, and the stamps of the files it depends on."""

    fingerprint: str
    key: str
    stamps: dict[str, dict[str, Stamps]]


class NamedComposer:
    """Composes by name, for one base and one manifest. Several threads may use it.

    Later compositions follow a change of a local expert on disk, in folders with other names. As long as no file of the
    experts and the base changes, a name is planned once. An expert on the Hub is looked up once.

    Args:
        manifest: the experts and the names that may be requested.
        base_model: the folder or Hub id of the served base. All experts are assumed to be of this base.
        cache: where the adapters are written.
        max_lora_rank: the highest rank that an adapter may have; None for no limit.

    Raises:
        NotFoundError: the base's config is not a local file and could not be downloaded.
        BaseModelError: the config does not determine the base's layers or modules.
    """

    target = Target.VLLM

    def __init__(self, manifest: Manifest, base_model: str, cache: Cache, max_lora_rank: int | None) -> None:
        self.manifest = manifest
        self.base_model = base_model
        self.cache = cache
        self.max_lora_rank = max_lora_rank
        self._base, config = Reference(base_model).config()
        self.num_layers = Depth.known(ModelConfig(config).num_layers, base_model, "Check the base")
        # These may change the names of modules in the output: see `with_written_names`.
        self._names = [config, version("transformers")]
        self._shapes = base_shapes(base_model, cache.memo)
        self._from_hub: dict[str, Adapter] = {}
        self._planned: dict[str, _Planned] = {}  # by requested name
        self._served: dict[str, set[str]] = {}  # compositions, and the names by which each was requested
        self._lock = threading.Lock()
        self._allowed: set[str] | None = None
        if manifest.allow is not None:
            self._allowed = {self._rules(name) for name in manifest.allow}

    def folder(self, name: str, composed: Callable[[float], object] = lambda seconds: None) -> Path:
        """The folder of the adapter that `name` means.

        Args:
            name: the name that the client requested.
            composed: called with the seconds that composing took, if the folder was not in the cache.

        Raises:
            UnknownNameError: the name is unknown, names an expert that does not exist, or is not allowed.
            FieldError, CompositionError: the name is malformed, or the experts cannot be composed in this way.
            ExpertError: an expert is damaged or belongs to another base.
            UnsupportedError: an expert is of a kind that cannot be composed or served; the result is not low-rank; the
                rank is too high.
            RunError: the limit on compositions is reached.
            OutputError: the cache cannot be written.
        """
        begun, written = time.perf_counter(), False

        def write(path: Path) -> None:
            nonlocal written
            current = plan or self.plan(name)
            if self.key(current) != planned.key:
                raise ExpertError(
                    f"An expert of {shown(name)} changed while it was requested", "Request it again", parameter="name"
                )
            # Hashing and copying both check the files' stamps, so the hashes are of the files that are copied.
            for_any_engine(current, Form()).write(path, hashes=self._hashes(current), companions=False)
            written = True

        with self._hidden_paths():
            known, plan = self._planned.get(name), None
            if known is not None and known.stamps == self._stamps(known.stamps):
                planned = known
            else:
                stamps = self._stamps(self._composition(name).expert_names)
                plan = self.plan(name)
                planned = _Planned(_fingerprint(plan), self.key(plan), stamps)
            self._admit(name, planned.fingerprint)
            try:
                folder = self.cache.get(planned.key, write)
            except BaseException:
                self.release(name)
                raise
            self._planned[name] = planned
        if written:
            composed(time.perf_counter() - begun)
        return folder

    def release(self, name: str) -> None:
        """Stop counting a name that was unloaded or could not be composed. Its folder stays until a restart.

        A composition counts as long as one of its names does.
        """
        with self._lock:
            self._forget(name)
            self._planned.pop(name, None)

    def _stamps(self, experts: Iterable[str]) -> dict[str, dict[str, Stamps]]:
        """The stamps of the files in the folders of the experts and the base, by which a change is noticed."""
        folders = {name: expand(self.manifest.adapters[name]) for name in experts if name != BASE}
        folders |= {name: self._from_hub[name].source.folder for name in folders if name in self._from_hub}
        return {name: stamps_in(folder) for name, folder in (*folders.items(), (BASE, self._base.folder))}

    def plan(self, name: str) -> Plan:
        """The plan for `name`, checked as far as possible before tensors are read; raises the errors of `folder`."""
        composition = self._composition(name)
        if self._allowed is not None and self._rules(name) not in self._allowed:
            raise UnknownNameError(
                f"This server does not allow the name {shown(name)}",
                f"Ask for one of {', '.join(self.manifest.allow or ())}",
                parameter="name",
            )

        experts = {expert: self.open(expert) for expert in composition.expert_names}
        composition = composition.model_copy(update={"base_model": self.base_model})
        plan = make_plan(composition, experts, num_layers=self.num_layers)

        problems = Problems()
        self.target.report(plan, problems, name=shown(name), parameter="name", most=self.max_lora_rank)
        problems.raise_if_any()
        return plan

    def _composition(self, name: str) -> Composition:
        return composition_of(name, self.manifest.experts, self.manifest.chains)

    def check_chains(self, experts: Mapping[str, Adapter]) -> tuple[str, ...]:
        """Check the chains of the opened experts, so that none fails at its first request.

        Returns:
            What could not be checked.

        Raises:
            AdapterswapError: an adapter cannot be on top of others in its chain.
        """
        problems = Problems()
        _, unchecked = with_chains(experts, self.manifest.chains, problems, recorded=False)
        problems.raise_if_any()
        return unchecked

    def open(self, name: str) -> Adapter:
        """The expert, or the adapter of a chain, of this name, checked against the base.

        Raises:
            NotFoundError: it does not exist.
            ExpertError: it is damaged, does not fit the base, or carries a copy of another base's weight.
            BaseModelError: its record says that it was trained on another base.
            UnsupportedError: it is of a kind that cannot be composed or served.
        """
        if name in self._from_hub:
            return self._from_hub[name]
        adapter = open_adapter(self.manifest.adapters[name])
        if name not in self.manifest.stacked:  # planning checks those
            check_base_weights({name: adapter.base_fingerprints}, self._base, {name: adapter.config.base_reference})
        check_fits(adapter, self._shapes, name, self.target)
        check_served_copies(adapter, self.base_model, self.cache.memo, name, self.target.called)
        if adapter.source.revision:
            self._from_hub[name] = adapter
        return adapter

    def other_bases(self, experts: Mapping[str, Adapter]) -> list[str]:
        """A remark for each expert whose config names another base than the served one."""
        remarks: list[str] = []
        for name, adapter in experts.items():
            if name in self.manifest.stacked:  # on top of another adapter
                continue
            remark = other_base(adapter, name, self.base_model)
            if remark is not None:
                remarks.append(remark)
        return remarks

    def key(self, plan: Plan) -> str:
        """The name of the plan's folder: a hash of the experts' content and everything else that determines the output.

        Raises:
            ExpertError: an expert changed since it was opened.
        """
        origin = {
            "adapterswap": __version__,
            "format": FORMAT,
            "num_layers": plan.num_layers,
            "base_model": [plan.base.name, plan.base.revision],
            "names": self._names,
            "what": _fingerprint(plan),
            "experts": self._hashes(plan),
            "configs": {name: adapter.config.sha256 for name, adapter in plan.adapters.items()},
        }
        return hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:32]

    def _hashes(self, plan: Plan) -> dict[str, str]:
        return {name: self.cache.hash_of(adapter) for name, adapter in plan.adapters.items()}

    @contextmanager
    def _hidden_paths(self) -> Iterator[None]:
        """Replace the paths of experts and cache in errors: clients see names only."""
        try:
            yield
        except UnknownNameError:
            raise
        except AdapterswapError as error:
            names = {path: name for name, path in self.manifest.adapters.items() if os.path.isabs(path)}
            names[str(self.cache.root)] = "the cache"
            raise error.with_names(names) from error

    def _rules(self, name: str) -> str:
        """The composition's rules, which `allow` compares, without opening an expert."""
        composition = self._composition(name)
        return json.dumps([rule.model_dump(mode="json") for rule in composition.rules(self.num_layers)])

    def _admit(self, name: str, fingerprint: str) -> None:
        """Count compositions, so that requests cannot fill the disk. Names of one composition count once."""
        with self._lock:
            self._forget(name)  # since an expert changed, the name may mean another composition
            if fingerprint not in self._served and len(self._served) >= self.manifest.max_compositions:
                raise RunError(
                    f"This server already serves {len(self._served)} compositions; max_compositions allows no more",
                    "Request one of those, unload one, or raise max_compositions in experts.yaml",
                    parameter="max_compositions",
                )
            self._served.setdefault(fingerprint, set()).add(name)

    def _forget(self, name: str) -> None:
        """Forget a name, and the compositions that no other name stands for."""
        for fingerprint, names in list(self._served.items()):
            names.discard(name)
            if not names:
                del self._served[fingerprint]


def other_base(adapter: Adapter, name: str, base_model: str) -> str | None:
    """A remark if the config of the adapter `name` names another base than this folder or Hub id."""
    (served, revision), config = Reference(base_model).parts, adapter.config
    compared = adapter.base_fingerprints and os.path.isdir(expand(base_model))  # when it was opened
    other_revision = None not in (revision, config.revision) and revision != config.revision
    if compared or not config.base_model or (same_base(config.base_model, served) and not other_revision):
        return None
    return f"{name} says that its base is {config.base_reference}; {base_model} is assumed to be the same"


def _fingerprint(plan: Plan) -> str:
    """A hash of what the plan does to every module: the same for all spellings of a composition and all weights."""
    modules = {}
    for module in plan:
        rule, weights = module.rule, module.weights
        assert rule is not None

        # Coefficients that depend on magnitudes or angles are divided by the sum of all weights later.
        total = 1.0
        if rule.combines_sides and rule.normalizes:
            total = math.fsum(weights.values()) or 1.0
        terms = [(term.expert, term.side, term.coefficient / total) for term in module.terms]

        settings: list[Any] | None = None
        if rule.combines_sides:
            settings = [rule.method, rule.weights, {side: weight / total for side, weight in weights.items()}]
            if rule.parameters:
                settings.append(rule.parameters)
        modules[module.name] = [terms, settings]
    content = {"modules": modules, "experts": list(plan.experts), "row_threshold": plan.composition.row_threshold}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def for_any_engine(plan: Plan, form: Form) -> Prepared:
    """The plan in a layout without patterns, which some engines ignore.

    If all modules have one rank and scale, as in a swap of experts that were trained alike, this is the exact layout,
    whose tensors are copied byte for byte. Otherwise it is the portable layout, which must be computed.
    """
    layout: Literal["exact", "portable"] = "exact"
    if form.max_rank is not None or form.max_error is not None:  # which takes long, and leaves nothing to copy
        layout = "portable"
    with suppress(AdapterswapError):  # an alpha out of bounds, which "portable" avoids; other errors occur again
        exact = prepare(plan, replace(form, layout=layout))
        if not exact.layout.config["rank_pattern"] and not exact.layout.config["alpha_pattern"]:
            return exact
    return prepare(plan, replace(form, layout="portable"))
