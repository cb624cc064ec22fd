"""The studio's page: Compose beside Try, Export, Analyze and Evaluate.

Connects controls to the workspace's functions and shows what they return or raise. A visitor's composition is held by
the address of their page, not by the server.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import gradio as gr
from gradio.exceptions import ComponentProcessingError, InvalidPathError

from adapterswap.core import BASE, ZONES
from adapterswap.experiments.studio import evaluations
from adapterswap.experiments.studio.answers import Answering
from adapterswap.experiments.studio.choice import LONGEST_PROMPT, Choice, check_values, first_choice, from_address
from adapterswap.experiments.studio.controls import WEIGHTS, Controls, is_offered, packed, title_of
from adapterswap.experiments.studio.export import FILES, lines, write_file
from adapterswap.experiments.studio.guards import REFUSED
from adapterswap.experiments.studio.html import (
    COLUMNS,
    analysis_html,
    columns,
    error_html,
    strip_html,
    suggestion_html,
    text,
    waiting_html,
)
from adapterswap.experiments.studio.workspace import Visitors, Workspace
from adapterswap.kit.errors import AdapterswapError, ArgumentError, CompositionError
from adapterswap.kit.files.folders import scratch_folder

_NEXT = "the next expert"
_FAST: dict[str, Any] = {"queue": False, "show_progress": "hidden", "trigger_mode": "always_last"}
_HIDDEN: dict[str, Any] = {"api_visibility": "private"}
_SAY = """(auto, ...values) => {
  document.dispatchEvent(new CustomEvent('studio:%s', {detail: {draw: %s, answer: %s, auto, values}})); return [];
}"""
# The button that empties a list is no input of Gradio's, only a change; so are updates by the page itself.
_EMPTIED = """(auto, ...values) => {
  if (values.slice(5, 7).some((names) => names.length === 0))
    document.dispatchEvent(new CustomEvent('studio:ask', {detail: {draw: true, answer: auto, auto, values}}));
  return [];
}"""
_PROBLEM = "document.addEventListener('studio:problem', (event) => { props.value = event.detail; });"
_STOP = "() => { document.dispatchEvent(new CustomEvent('studio:stop')); return []; }"
_ROWS = f"""element.addEventListener("change", async (event) => {{
  const [file] = event.target.files;
  props.value = file ? await file.slice(0, {evaluations.LARGEST_FILE + 1}).text() : "";
}});"""
_REPLACE = "(address) => { history.replaceState(null, '', address + location.hash); return []; }"


def _asset(name: str) -> str:
    """The text of a file beside this one."""
    return files("adapterswap.experiments.studio").joinpath(name).read_text(encoding="utf-8")


class _Blocks(gr.Blocks):  # type: ignore[misc]  # Gradio has no types
    """Blocks that show what is wrong with an input; other errors are printed where the studio runs."""

    async def process_api(self, *arguments: Any, **named: Any) -> Any:
        """Run an event's function on the values that a page sent."""
        try:
            check_values(named["inputs"])
            return await super().process_api(*arguments, **named)
        except (ComponentProcessingError, InvalidPathError):
            message = "The page sent a value that its controls do not have. Reload the page"
        except AdapterswapError as error:
            message = str(error)
        except gr.Error as error:
            message = error.message
        named["request"].request.scope[REFUSED] = True
        raise gr.Error(text(message), print_exception=False)


class _Page:
    """The page of one workspace; `build` creates its components."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.names = list(workspace.experts)
        zones = workspace.lab.zones if workspace.lab else None
        self.first = first_choice(self.names, workspace.num_layers, zones)
        self.evaluations = Visitors()
        self.first_number = 1
        if workspace.lab is not None:
            with suppress(AdapterswapError):  # the page shows why the composition has no answers
                self.first_number += workspace.first_problem(workspace.composition(self.first))

    def build(self) -> Any:
        """The page, with the route that answers prompts."""
        with _Blocks(analytics_enabled=False, title="adapterswap studio", delete_cache=(600, 3600)) as blocks:
            self._head()
            with gr.Row(equal_height=False, elem_id="studio"):  # page.css places the columns
                with gr.Column(min_width=0, elem_classes="drawing"):
                    self._draw()
                with gr.Column(min_width=0, elem_classes="compose"):
                    self._compose()
                with gr.Column(min_width=0, elem_classes="panels"), gr.Tabs():
                    with gr.Tab("Try"):
                        self._try()
                    with gr.Tab("Export", render_children=True):  # updated while hidden, too
                        self._export()
                    with gr.Tab("Analyze") as self.analyze_tab:
                        self._analyze()
                    with gr.Tab("Evaluate"):
                        self._evaluate()
            self._wire(blocks)
        blocks.studio_routes = [Answering(self.workspace, self.names, self.controls, self._drawn).route]
        return blocks

    # components

    def _head(self) -> None:
        """The title, and what is wrong with experts."""
        workspace = self.workspace
        seed = ""
        folder = PurePath(workspace.base_model).parent.name
        if folder.startswith("seed-"):
            seed = f"Seed {folder.removeprefix('seed-')} of a lab run, "
        gr.HTML(
            f'<div id="head"><h1>adapterswap studio</h1><p>{seed}{text(workspace.base_model)}, {workspace.num_layers} '
            "layers. Choose which expert each layer comes from, and watch the answers change.</p></div>",
            js_on_load=_asset("names.js"),
        )

        for name, fault in workspace.faults.items():
            gr.HTML(f"<p>{text(name)} could not be opened:</p>{error_html(fault)}")
        for name, fault in workspace.not_live.items():
            gr.HTML(f"<p>{text(name)} can be composed but cannot answer prompts here:</p>{error_html(fault)}")

    def _draw(self) -> None:
        """The strip, and the error of a composition that cannot be planned."""
        drawn = self._drawn(self.first)
        self.strip = gr.HTML(drawn.get("strip", ""), js_on_load=_asset("page.js"), elem_id="strip")
        # Empty until the page's own address was read, which may be right where the first composition is not.
        self.problem = gr.HTML("", js_on_load=_PROBLEM, elem_id="problem", visible=True)

    def _compose(self) -> None:
        """The brush, the controls, and the field that opens another expert."""
        with gr.Row(equal_height=True):
            self.brush = gr.Radio(
                [_NEXT, *self.names, BASE], value=_NEXT, label="A click gives the layer to", elem_id="brush"
            )
        with gr.Row():
            self.defaults = gr.Button("Use the paper's layers", size="sm", min_width=140)
            self.clear = gr.Button("Undo clicks", size="sm", min_width=120, elem_id="undo")
        self.controls = Controls(self.workspace, self.first)
        self.painted = gr.JSON({}, visible="hidden")  # not `State`, which the browser cannot read
        with gr.Row(visible=self.workspace.allow_paths, equal_height=True):
            self.path = gr.Textbox(label="Open another expert: a folder or Hub id", elem_id="path", scale=4)
            self.open = gr.Button("Open", size="sm", elem_id="open", min_width=80)
        self.open_problem = gr.HTML("")

    def _try(self) -> None:
        """A prompt, or a problem of a lab run, and the answers."""
        lab = self.workspace.lab
        spoken, number_shown, length = ["en"], 100, 64
        if lab:
            spoken, number_shown, length = list(lab.languages), lab.on_page, 24
        with gr.Row(visible=lab is not None, equal_height=True):
            self.spoken = gr.Radio(spoken, value=spoken[0], label="Problem language", scale=2, min_width=120)
            self.number = gr.Slider(
                1,
                number_shown,
                step=1,
                value=self.first_number,
                label="Problem",
                scale=4,
                min_width=180,
                buttons=[],
            )
        self.prompt = gr.Textbox(
            self._problem_text(spoken[0], self.first_number),
            label="Prompt",
            lines=2,
            max_lines=8,
            elem_id="prompt",
            max_length=LONGEST_PROMPT,
        )
        with gr.Row(equal_height=True):
            self.go = gr.Button("Answer", variant="primary", size="md", elem_id="go", min_width=160, scale=0)
            self.stop = gr.Button("Stop", size="md", min_width=80, scale=0, elem_id="stop")

        sliders = text(json.dumps(self.controls.sliders))
        self.answers = gr.HTML(
            f'<div id="meaning"></div><div id="written" aria-live="polite" aria-busy="true" data-sliders="{sliders}">'
            f"{waiting_html(columns(self.workspace, self.first, [*COLUMNS]), self.names)}</div>"
            '<div id="timing"></div><div id="scores"></div>',
            js_on_load=_asset("answers.js"),
            elem_id="answers",
        )

        with gr.Accordion("Options", open=False):
            labels_and_kinds = [(label, kind) for kind, label in COLUMNS.items()]
            self.shown = gr.CheckboxGroup(labels_and_kinds, value=list(COLUMNS), label="Compare")
            self.auto = gr.Checkbox(True, label="Answer again when the composition changes")
            has_template = bool(getattr(self.workspace.tokenizer, "chat_template", None))
            self.chat = gr.Checkbox(self.workspace.is_chat, label="Apply the chat template", visible=has_template)
            self.tokens = gr.Slider(1, 512, value=length, step=1, label="Maximum new tokens", buttons=[])

    def _export(self) -> None:
        """The panel with commands to copy and files to download."""
        self.max_rank = gr.Number(0, label="Maximum rank (0: no limit)", precision=0, minimum=0, elem_id="max-rank")
        self.taken = gr.HTML("", js_on_load=_asset("copy.js"), elem_id="taken")
        self.address = gr.Textbox(self.first.address(), visible="hidden", elem_id="address")
        self.make = {}
        with gr.Row():
            for kind, label in FILES.items():
                self.make[kind] = gr.Button(f"Export the {label}", size="sm", elem_id=f"make-{kind}", min_width=140)
        self.made = gr.File(label="Ready to download", visible=False, elem_id="made", interactive=False)
        self.make_problem = gr.HTML("")

    def _analyze(self) -> None:
        """The panel with measurements and suggested layers."""
        gr.HTML(
            '<p class="timing">Where each expert changed the base, layer by layer, and how the changes of two experts '
            "compare.</p>"
        )
        with gr.Row():
            self.measure = gr.Button("Measure again", size="sm")
            self.suggest = gr.Button("Suggest layers", size="sm", elem_id="suggest")
            self.use = gr.Button("Use the suggestion", size="sm", visible=False, elem_id="use-suggestion")
        self.suggested = gr.HTML("", elem_id="suggested")
        self.zones = gr.State(None)
        self.measured = gr.HTML("", elem_id="measured")

    def _evaluate(self) -> None:
        """The panel that evaluates a composition on a task, and the table of results."""
        known = evaluations.tasks(self.workspace)
        with gr.Row(equal_height=True):
            self.task = gr.Dropdown(known, value=known[0], label="Task", scale=3, min_width=180, elem_id="task")
            self.limit = gr.Slider(10, 500, value=100, step=10, label="Documents", scale=2, min_width=180, buttons=[])

        # The browser reads the user's file, so that the server needs no uploads.
        label = 'Your file: JSON Lines with "prompt" and "answer"'
        self.rows = gr.HTML(
            "",
            html_template=f"<label>{label} <input type=file accept=.jsonl></label>",
            js_on_load=_ROWS,
            visible=False,
            elem_id="rows",
        )
        with gr.Row(equal_height=True):
            self.evaluate = gr.Button(
                "Evaluate", variant="primary", size="md", elem_id="evaluate", min_width=160, scale=0
            )
            self.evaluate_stop = gr.Button("Stop", size="md", min_width=80, scale=0, elem_id="evaluate-stop")

        self.progress = gr.HTML("", elem_id="evaluating")
        self.kept = gr.BrowserState([], storage_key="adapterswap-evaluated", secret="adapterswap")
        self.table = gr.HTML(evaluations.table_html([]), elem_id="evaluated")
        with gr.Row(elem_id="kept"):
            self.save_table = gr.Button("Export as CSV", size="sm", elem_id="export")
            self.forget = gr.Button("Clear the table", size="sm")
        self.exported = gr.File(label="Ready to download", visible=False, interactive=False, elem_id="exported")

    # events

    @property
    def _inputs(self) -> list[Any]:
        return [self.painted, self.prompt, *self.controls.components.values()]

    def _choice(self, painted: Mapping[str, str], prompt: str, *values: Any) -> Choice:
        named = dict(zip(self.controls.components, values, strict=True))
        return self.controls.choice(named, painted, prompt)

    def _drawn(self, choice: Choice) -> dict[str, str]:
        """Strip, problem and address of a choice. If it cannot be planned, there is no strip and the last one stays."""
        try:
            plan = self.workspace.plan(self.workspace.composition(choice))
            strip = strip_html(plan, self.names, title=title_of(choice.fields), painted=list(choice.painted))
            drawn = {"strip": strip, "problem": ""}
        except AdapterswapError as error:
            drawn = {"problem": error_html(error)}
        return {**drawn, "address": choice.address()}

    def _redraw(self, choice: Choice, max_rank: float | None) -> list[Any]:
        """[strip, problem, taken, address] of a choice."""
        drawn = self._drawn(choice)
        taken = self._taken(choice, max_rank)
        return [drawn.get("strip", gr.skip()), drawn["problem"], taken, drawn["address"]]

    def _taken(self, choice: Choice, max_rank: float | None) -> str:
        """The composition as a command, as Python and as a recipe."""
        try:
            composition = self.workspace.composition(choice)
            self.workspace.plan(composition)
        except AdapterswapError as error:
            return error_html(error)

        rank = int(max_rank) if max_rank else None
        made = lines(composition, self.workspace.num_layers, max_rank=rank)
        first = ""
        if made.needs_recipe:
            first = "<p>Save the YAML below as composition.yaml first.</p>"
        words = " ".join(f"<span>{text(shlex.quote(word))}</span>" for word in shlex.split(made.command))
        blocks = (
            ("Command line", first, words),
            ("Python", "", text_lines(made.python)),
            ("YAML", "", text_lines(made.yaml)),
        )

        sections = ""
        for number, (title, remark, content) in enumerate(blocks):
            sections += (
                f'<section><h4>{title}<button type="button" data-copy="copy-{number}" aria-label="Copy: {title}">Copy'
                f'</button></h4>{remark}<pre id="copy-{number}" tabindex="0">{content}</pre></section>'
            )
        return f'<div class="take">{sections}</div>'

    def _restore(self, query: str | None) -> list[Any]:
        """The page for an address: [brush, painted, prompt, spoken, number, *controls, *what `_redraw` returns].

        The brush offers experts that visitors opened after the page was built.
        """
        problem: AdapterswapError | None = None
        try:
            choice = from_address(query or "", self.first)
            self.workspace.composition(choice)
            if not is_offered(choice.fields):
                method = choice.fields["method"]
                raise ArgumentError(f"The studio does not offer {method}", "Use `merge`", parameter="method")
        except AdapterswapError as error:
            problem, choice = error, self.first

        updates = self.controls.updates(choice)
        drawn = self._redraw(choice, None)
        if problem is not None:
            drawn[1] = error_html(problem)

        # A prompt that is one of the lab's problems also moves the controls for its language and number.
        prompt = choice.prompt or self._problem_text(self.spoken.value, self.first_number)
        shown = [gr.skip(), gr.skip()]
        lab = self.workspace.lab
        if lab and prompt in lab.place_of:
            language, place = lab.place_of[prompt]
            shown = [language, place + 1]
        brush = gr.update(choices=[_NEXT, *self.names, BASE])
        return [brush, packed(choice.painted), prompt, *shown, *updates, *drawn]

    def _problem_text(self, language: str, number: float) -> str:
        """The prompt of one of the lab's problems, counted from 1; empty without a lab."""
        if self.workspace.lab is None:
            return ""
        if language not in self.workspace.lab.languages:
            raise ArgumentError(f"There are no problems in {language}", "Choose a language", parameter="language")
        return self.workspace.lab.problems[int(number) - 1].prompt(language)

    def _give(self, event: gr.EventData, brush: str, max_rank: float | None, *inputs: Any) -> list[Any]:
        """Assign the clicked layer or cell: [painted, strip, problem, taken, address]."""
        choice = self._choice(*inputs)
        cell = ""
        if isinstance(event._data, dict):
            cell = str(event._data.get("cell", ""))
        try:
            plan = self.workspace.plan(self.workspace.composition(choice))
        except AdapterswapError as error:
            return [gr.skip(), gr.skip(), error_html(error), gr.skip(), gr.skip()]

        # The owner of each kind of module that was clicked: `3.mlp` is one of them, `3` the whole layer.
        layer, _, kind = cell.partition(".")
        places = {}
        for slot in plan:
            if slot.layer is not None and str(slot.layer) == layer and kind in ("", slot.kind):
                places[f"{slot.layer}.{slot.kind}"] = slot.owner

        owners = [*self.names, BASE]
        wanted = brush
        if brush == _NEXT:
            current = next(iter(places.values()), None)
            following = 0
            if current in owners:
                following = (owners.index(current) + 1) % len(owners)
            wanted = owners[following]
        painted = packed(choice.painted)
        if wanted in owners:
            painted |= dict.fromkeys(places, wanted)
        return [painted, *self._redraw(self._choice(painted, *inputs[1:]), max_rank)]

    def _make(self, kind: str, max_rank: float | None, *inputs: Any) -> Iterator[list[Any]]:
        """[made, problem]: a file to download, which Gradio copies, or the error."""
        rank = int(max_rank) if max_rank else None
        with scratch_folder("studio") as folder:
            try:
                composition = self.workspace.composition(self._choice(*inputs))
                path = write_file(self.workspace, composition, kind, folder, max_rank=rank)
            except AdapterswapError as error:
                yield [gr.update(visible=False), error_html(error)]
            else:
                yield [gr.update(value=str(path), visible=True), ""]

    def _measure(self, *inputs: Any) -> str:
        """The analysis of the chosen experts."""
        choice = self._choice(*inputs)
        try:
            chosen = {*choice.task, *choice.language, *choice.painted.values()}
            named = [name for name in self.names if name in chosen]
            if not named:
                raise CompositionError("No expert is chosen", "Choose a task expert", parameter="task")
            return analysis_html(self.workspace.analysis(named), self.names, self.workspace.num_layers)
        except AdapterswapError as error:
            return error_html(error)

    def _suggest(self, *inputs: Any) -> list[Any]:
        """[suggested, zones, use]: what `suggest` proposes for the first expert of each side."""
        choice = self._choice(*inputs)
        try:
            task = [name for name in choice.task if name != BASE]
            language = [name for name in choice.language if name != BASE]
            if not task or not language:
                raise CompositionError(
                    "A suggestion needs an expert on each side", "Choose a task and a language expert", parameter="task"
                )
            suggestion = self.workspace.suggestion(task[0], language[0])
        except AdapterswapError as error:
            return [error_html(error), None, gr.update(visible=False)]
        return [suggestion_html(suggestion), dict(suggestion.composition), gr.update(visible=True)]

    def _evaluate_now(
        self, request: gr.Request, task: str, limit: float, content: str | None, kept: Any, *inputs: Any
    ) -> Iterator[list[Any]]:
        """Evaluate the composition; yields [progress, kept, table]."""
        with self.evaluations.work(request.session_hash or "") as stopped:
            yield from self._evaluated(stopped, task, int(limit), content, kept, *inputs)

    def _evaluated(
        self, stopped: threading.Event, task: str, limit: int, content: str | None, kept: Any, *inputs: Any
    ) -> Iterator[list[Any]]:
        """What `_evaluate_now` yields."""
        choice = self._choice(*inputs)
        rows = evaluations.as_rows(kept)
        try:
            composition = self.workspace.composition(choice)
            self.workspace.plan(composition)
            own: Sequence[Any] = ()
            if task == evaluations.OWN_FILE:
                if not content:
                    raise CompositionError("No file was chosen", "Choose one above", parameter="file")
                own = evaluations.read_rows(content)

            yield [progress_html(None), gr.skip(), gr.skip()]
            running = evaluations.evaluate_live(
                self.workspace,
                composition,
                task,
                limit,
                label=label_of(choice),
                address=replace(choice, prompt="").address(),
                stopped=stopped,
                rows=own,
            )
            has_ended = False
            for news in running:
                if isinstance(news, evaluations.Progress):
                    yield [progress_html(news), gr.skip(), gr.skip()]
                else:
                    has_ended = True
                    rows = [*rows, news]
                    yield ["", [asdict(row) for row in rows], evaluations.table_html(rows)]
            if stopped.is_set() and not has_ended:
                yield ['<p class="timing">Stopped.</p>', gr.skip(), gr.skip()]
        except AdapterswapError as error:
            yield [error_html(error), gr.skip(), gr.skip()]

    def _open(self, path: str) -> list[Any]:
        """Open another expert and offer it everywhere: [task, language, brush, problem, path]."""
        try:
            self.workspace.add(path.strip())
        except AdapterswapError as error:
            return [gr.skip(), gr.skip(), gr.skip(), error_html(error), gr.skip()]
        self.names[:] = list(self.workspace.experts)
        task = gr.update(choices=self.names)
        language = gr.update(choices=[*self.names, BASE])
        brush = gr.update(choices=[_NEXT, *self.names, BASE])
        return [task, language, brush, "", ""]

    def _wire_measuring(self, blocks: Any, everything: list[Any]) -> None:
        """Connect the controls of Analyze and Evaluate."""
        once: dict[str, Any] = {"concurrency_id": "measuring", "concurrency_limit": 1, **_HIDDEN}
        gr.on([self.analyze_tab.select, self.measure.click], self._measure, self._inputs, self.measured, **once)
        self.suggest.click(self._suggest, self._inputs, [self.suggested, self.zones, self.use], **once)

        def use(zones: dict[str, Any] | None, max_rank: float | None, *inputs: Any) -> list[Any]:
            before = self._choice(*inputs)
            fields = {"method": "layer_swap", **(zones or {})}
            choice = Choice(before.task, before.language, fields, {}, before.prompt)
            return [{}, *self.controls.updates(choice), *self._redraw(choice, max_rank)]

        self.use.click(
            use, [self.zones, self.max_rank, *self._inputs], [self.painted, *everything], **_FAST, **_HIDDEN
        ).success(**self._again)
        self.task.input(
            lambda task: gr.update(visible=task == evaluations.OWN_FILE), self.task, self.rows, **_FAST, **_HIDDEN
        )
        self.evaluate.click(
            self._evaluate_now,
            [self.task, self.limit, self.rows, self.kept, *self._inputs],
            [self.progress, self.kept, self.table],
            show_progress="hidden",
            concurrency_limit=None,
            **_HIDDEN,
        )

        def stop(request: gr.Request) -> None:
            self.evaluations.leave(request.session_hash or "")

        self.evaluate_stop.click(stop, None, None, **_FAST, **_HIDDEN)
        blocks.unload(stop)

        def table(kept: Any) -> str:
            return evaluations.table_html(evaluations.as_rows(kept))

        self.kept.change(table, self.kept, self.table, **_FAST, **_HIDDEN)  # also when the browser restores it
        self.forget.click(lambda: [[], evaluations.table_html([])], None, [self.kept, self.table], **_FAST, **_HIDDEN)

        def export(kept: Any) -> Iterator[Any]:
            with scratch_folder("studio") as folder:
                path = folder / "evaluated.csv"
                path.write_text(evaluations.as_csv(evaluations.as_rows(kept)), encoding="utf-8")
                yield gr.update(value=str(path), visible=True)

        self.save_table.click(export, self.kept, self.exported, **_HIDDEN)

    def _wire(self, blocks: Any) -> None:
        """Connect events of the page's components with what they update."""
        controls = self.controls.components
        drawn = [self.strip, self.problem, self.taken, self.address]

        def redraw(max_rank: float | None, *inputs: Any) -> list[Any]:
            return self._redraw(self._choice(*inputs), max_rank)

        def preset(max_rank: float | None, *inputs: Any) -> list[Any]:
            choice = self._choice(*inputs)
            updates = self.controls.updates(choice)
            return [*updates, *self._redraw(choice, max_rank)]

        def reset(max_rank: float | None, *inputs: Any) -> list[Any]:
            before = self._choice(*inputs)
            choice = Choice(before.task, before.language, {"method": "layer_swap"}, {}, before.prompt)
            return [{}, *self.controls.updates(choice), *self._redraw(choice, max_rank)]

        def unpaint(max_rank: float | None, *inputs: Any) -> list[Any]:
            return [{}, *self._redraw(self._choice({}, *inputs[1:]), max_rank)]

        # Weights are shown while a transition zone averages.
        transitions = [controls[name] for name in ZONES[2:]]
        gr.on(
            [slider.input for slider in transitions],
            lambda *layers: [gr.update(visible=self.controls.averages(layers))] * len(WEIGHTS),
            transitions,
            [controls[name] for name in WEIGHTS],
            **_FAST,
            **_HIDDEN,
        )

        # What sends the page's choice to the answering route, and what of it is answered
        moved = [component.input for name, component in controls.items() if name != "preset"]
        sent = [self.auto, self.shown, self.tokens, self.chat, *self._inputs]
        asking: dict[str, Any] = {"fn": None, "inputs": sent, "outputs": [], **_HIDDEN}
        answering = {**asking, "js": _SAY % ("ask", "false", "true")}
        self._again = again = {**asking, "js": _SAY % ("ask", "false", "auto")}
        redrawing = {**asking, "js": _SAY % ("ask", "true", "auto")}
        gr.on(moved, **redrawing)
        gr.on([controls[name].change for name in ("task", "language")], **{**asking, "js": _EMPTIED})
        typed = [self.prompt, self.auto, self.shown, self.tokens, self.chat]
        gr.on([component.input for component in typed], **{**asking, "js": _SAY % ("know", "false", "false")})

        def take(max_rank: float | None, *inputs: Any) -> str:
            return self._taken(self._choice(*inputs), max_rank)

        # The page sends this a moment after a control moved. Gradio keeps the update for a hidden panel.
        self.answers.submit(take, [self.max_rank, *self._inputs], self.taken, **_FAST, **_HIDDEN)
        gr.on(
            [self.prompt.input, self.max_rank.input], redraw, [self.max_rank, *self._inputs], drawn, **_FAST, **_HIDDEN
        )

        # What changes the choice, draws it again, and has it answered again
        everything = [*controls.values(), *drawn]
        changed = [
            controls["preset"].input(preset, [self.max_rank, *self._inputs], everything, **_FAST, **_HIDDEN),
            self.defaults.click(reset, [self.max_rank, *self._inputs], [self.painted, *everything], **_FAST, **_HIDDEN),
            self.clear.click(unpaint, [self.max_rank, *self._inputs], [self.painted, *drawn], **_FAST, **_HIDDEN),
            self.strip.select(
                self._give, [self.brush, self.max_rank, *self._inputs], [self.painted, *drawn], **_FAST, **_HIDDEN
            ),
        ]

        # The page's own address, which holds the choice
        self.address.change(None, [self.address], [], js=_REPLACE, **_HIDDEN)
        restored = blocks.load(
            self._restore,
            [self.address],
            [self.brush, self.painted, self.prompt, self.spoken, self.number, *everything],
            js="() => location.search",
            **{**_FAST, **_HIDDEN},
        )
        for picker in (self.spoken, self.number):
            picked = picker.input(self._problem_text, [self.spoken, self.number], self.prompt, **_FAST, **_HIDDEN)
            picked.success(**redrawing)  # the address holds the prompt
        gr.on([self.go.click, self.prompt.submit], **answering)
        restored.success(**answering)
        for event in changed:
            event.success(**again)

        # The other panels
        self.stop.click(None, None, [], js=_STOP, **_HIDDEN)
        self._wire_measuring(blocks, everything)
        if self.workspace.allow_paths:
            self.open.click(
                self._open,
                self.path,
                [controls["task"], controls["language"], self.brush, self.open_problem, self.path],
                concurrency_id="measuring",
                concurrency_limit=1,
                **_HIDDEN,
            )
        for kind, button in self.make.items():
            button.click(
                _with_kind(self._make, kind),
                [self.max_rank, *self._inputs],
                [self.made, self.make_problem],
                concurrency_id="files",
                concurrency_limit=1,
                **_HIDDEN,
            )


def _with_kind(make: Callable[..., Iterator[list[Any]]], kind: str) -> Callable[..., Iterator[list[Any]]]:
    """An event's function for one kind of file. Gradio does not see that a `partial` of a method yields."""

    def call(*inputs: Any) -> Iterator[list[Any]]:
        yield from make(kind, *inputs)

    return call


def progress_html(progress: evaluations.Progress | None) -> str:
    """A progress bar, or a note that the model is busy."""
    if progress is None or not progress.of:
        return '<p class="timing" role="status">Waiting for the model …</p>'
    share = 100 * progress.done / progress.of
    return (
        f'<div class="progress" role="status"><span>{progress.done} of {progress.of}</span>'
        f'<span class="bar" role="progressbar" aria-label="Documents evaluated" aria-valuenow="{share:.0f}">'
        f'<i style="width:{share:.1f}%"></i></span></div>'
    )


def label_of(choice: Choice) -> str:
    """A short label of a choice for the table of results."""
    parts = [f"{' and '.join(choice.task)}+{' and '.join(choice.language)}"]
    for key, value in choice.fields.items():
        if (key, value) != ("method", "layer_swap"):
            parts.append(f"{key}={value}")
    if choice.painted:
        parts.append(f"{len(choice.painted)} changed by hand")
    return ", ".join(parts)


def text_lines(content: str) -> str:
    """Several lines, escaped for HTML."""
    return "\n".join(text(line) for line in content.split("\n"))


def page_css() -> str:
    """The style sheet of the studio's own elements."""
    return _asset("page.css")


def make_page(workspace: Workspace) -> Any:
    """The page of a workspace, to be served by `serve_page` with the routes in its `studio_routes`."""
    return _Page(workspace).build()
