"""A model that is loaded and checked: its template before its weights are read, its lane after."""

from collections.abc import Callable
from dataclasses import replace

from protocol.spec import WorkerSpec
from worker.engine.self_check import choose, sample
from worker.model.lanes import DETERMINISTIC, Lane
from worker.model.loader import Loaded, load
from worker.prompt.templates import adopt_template, check_template


def load_checked(spec: WorkerSpec, progress: Callable[[str, int, int], None]) -> Loaded:
    """Load what `spec` names and choose its lane; `progress` as for `load`. Raises `LoadFailed`."""
    if spec.chat_template:
        check_template(spec.chat_template)
    loaded = load(spec, progress)
    if not spec.chat_template:
        adopt_template(loaded.tokenizer, loaded.path)
    if spec.deterministic:
        return replace(loaded, plan=DETERMINISTIC)
    plan = choose(loaded.model, sample(loaded.tokenizer, loaded.vocab_size), spec.batching)
    if plan.lane is Lane.EQUAL and loaded.vision is not None and loaded.vision.needs.block:
        # Chunks of equal length would cut media whose tokens must run together.
        plan = replace(plan, lane=Lane.SINGLE)
    return replace(loaded, plan=plan)
