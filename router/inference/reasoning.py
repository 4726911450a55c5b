"""Reads a client's settings for a model's reasoning, and applies them to the request.

A chat template that supports reasoning gets the settings as variables. Otherwise they become a
token budget. The engine enforces it by forcing the end of the reasoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from baton.errors import InvalidRequest
from baton.reasoning import ReasoningSpan, Run
from baton.sampling_params import SamplingParams
from router.core.request import AnswerPart
from router.dialects.reasoning import ReasoningFormat
from router.inference.prompt import Ending
from router.text.chat_template import ChatTemplate

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
"""The efforts in rising order. A level that a model lacks is its nearest."""
_USUAL: frozenset[Effort] = frozenset({"low", "medium", "high"})
"""Levels that templates know without naming them."""
EFFORT_BUDGETS: Mapping[Effort, int] = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192}
"""Maximum number of reasoning tokens for each effort, if the chat template has no variable for it;
``high`` and above have no maximum."""
MAX_BUDGET = (1 << 31) - 1
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off: ``enable_thinking`` for Qwen 3, GLM
4.5 and SmolLM3, ``thinking`` for DeepSeek V3.1 and Granite."""
_EFFORT, _BUDGET = "reasoning_effort", "thinking_budget"
"""Names of chat template variables: that of the effort in gpt-oss's template, and that of the
budget in Seed-OSS's."""


@dataclass(frozen=True, slots=True)
class ReasoningInput:
    """A client's settings for the model's reasoning. None means that the client did not set the
    value."""

    effort: Effort | None = None
    effort_switches: bool = True
    """Whether an effort above ``none`` turns reasoning on. At Anthropic another field does."""
    enabled: bool | None = None
    """Whether the model should reason before its answer; None if not set."""
    budget: int | None = None
    """Maximum number of reasoning tokens."""
    budget_param: str = "thinking_token_budget"
    """The client's name for the field that sets the budget."""

    @property
    def wanted(self) -> bool | None:
        """Whether the model should reason, by all settings together; None if they do not say.
        Raises InvalidRequest if the settings contradict each other."""
        by_effort = None if self.effort is None else self.effort != "none"
        if by_effort and not self.effort_switches:
            return self.enabled
        if None not in (by_effort, self.enabled) and by_effort != self.enabled:
            raise InvalidRequest(
                f"the effort '{self.effort}' contradicts another field, which turns reasoning"
                f" {'on' if self.enabled else 'off'}; leave one of them out",
                param="reasoning_effort",
            )
        return by_effort if self.enabled is None else self.enabled


NOTHING_ASKED = ReasoningInput()


def checked_effort(given: Any, param: str) -> Effort | None:
    """Check the reasoning effort that a client gave. Raises InvalidRequest."""
    if given is None:
        return None
    if given not in EFFORTS:
        raise InvalidRequest(f"{param} must be one of {', '.join(EFFORTS)}", param=param)
    effort: Effort = given
    return effort


def checked_budget(given: Any, param: str) -> int | None:
    """Check the reasoning budget that a client gave; -1 means no maximum. Raises InvalidRequest."""
    if given is None or given == -1:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given <= MAX_BUDGET:
        raise InvalidRequest(f"{param} must be -1, or between 0 and {MAX_BUDGET}", param=param)
    return given


def checked_thinking(given: Any, param: str = "thinking") -> ReasoningInput:
    """Read Anthropic's ``thinking`` object, which has ``type`` and ``budget_tokens``. Raises
    InvalidRequest.
    """
    if given is None:
        return NOTHING_ASKED
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object with a type", param=param)
    kind, name = given.get("type"), f"{param}.budget_tokens"
    budget = checked_budget(given.get("budget_tokens"), name)
    match kind:
        case "enabled":
            return ReasoningInput(enabled=True, budget=budget, budget_param=name)
        case "adaptive":
            return ReasoningInput(enabled=True)
        case "disabled":
            return ReasoningInput(enabled=False)
        case _:
            raise InvalidRequest(
                f"{param}.type must be enabled, disabled or adaptive", param=f"{param}.type"
            )


def template_variables(
    asked: ReasoningInput, template: ChatTemplate, given: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the variables for a chat template: those in ``given``, and those for the reasoning
    settings.

    Raises InvalidRequest if they contradict each other.
    """
    if asked == NOTHING_ASKED:
        return given
    found: dict[str, Any] = {}
    if (wanted := asked.wanted) is not None:
        found = {name: wanted for name in SWITCHES if template.reads(name)}
    effort = _template_effort(asked, template)
    if effort is not None:
        found[_EFFORT] = effort
    if asked.budget is not None and template.reads(_BUDGET):
        found[_BUDGET] = asked.budget
    for name, value in found.items():
        if name in given and given[name] != value:
            raise InvalidRequest(
                f"chat_template_kwargs.{name} contradicts the request's own fields; leave it out",
                param=f"chat_template_kwargs.{name}",
            )
    return {**given, **found}


def _template_effort(asked: ReasoningInput, template: ChatTemplate) -> str | None:
    """Return the reasoning effort as a word that the chat template knows: the nearest one. Only a
    template that names ``none`` knows it."""
    if asked.effort is None or not template.reads(_EFFORT):
        return None
    known = [one for one in EFFORTS if one in _USUAL or template.mentions(one)]
    if asked.effort == "none":
        return "none" if "none" in known else None
    place = EFFORTS.index(asked.effort)
    return min(
        (one for one in known if one != "none"), key=lambda one: abs(EFFORTS.index(one) - place)
    )


def budget_of(asked: ReasoningInput, template: ChatTemplate) -> int | None:
    """Return the maximum number of reasoning tokens that the engine must enforce; None means no
    maximum. Raises InvalidRequest."""
    if asked.wanted is False:
        knows = any(template.reads(name) for name in SWITCHES)
        return None if knows or _template_effort(asked, template) is not None else 0
    if asked.budget is not None or asked.effort is None:
        return asked.budget
    return None if template.reads(_EFFORT) else EFFORT_BUDGETS.get(asked.effort)


def answer_part(
    form: ReasoningFormat | None, ending: Ending, message: str, prompt_end: str
) -> AnswerPart:
    """Return in which part an answer begins: ``reasoning``, ``content``, or undecided (``start``).

    ``message``: the last message of the conversation. ``prompt_end``: the end of its prompt.
    """
    if ending == "open":
        return "reasoning" if form is not None and form.is_open_in(message) else "content"
    if form is not None and form.is_opened_by(prompt_end):
        return "reasoning"
    # Some templates write empty reasoning, so that the model does not reason.
    is_closed = form is not None and ending == "answer" and prompt_end.rstrip().endswith(form.end)
    return "content" if is_closed else "start"


def reasoning_span(
    form: ReasoningFormat,
    begins_in: AnswerPart,
    budget: int | None,
    sampling: SamplingParams,
    marker_ids: Callable[[str], Run | None],
    param: str,
    *,
    to_content: bool = True,
) -> ReasoningSpan | None:
    """Return the token ids that mark the begin and end of an answer's reasoning. They are needed
    for a ``budget``, or for a grammar that applies after the reasoning.

    Return None if the answer has no reasoning, or if nothing depends on where the reasoning ends.
    ``marker_ids`` returns the token ids of a marker, or None if the marker has no tokens of its
    own. ``param``: the client's name for the budget. ``to_content``: true if content follows the
    reasoning, and no tool call. Raises InvalidRequest if a marker that is needed has no token."""
    if begins_in == "content" or (budget is None and sampling.grammar is None):
        return None
    if budget is not None and sampling.allowed_token_ids:
        raise InvalidRequest(f"{param} is not possible with allowed_token_ids", param=param)
    end = marker_ids(form.end + (form.answer if to_content else ""))
    start = () if begins_in == "reasoning" else marker_ids(form.start)
    if end is None or start is None:
        if begins_in == "start" and budget is None:
            # The grammar leaves no room for reasoning.
            return None
        raise InvalidRequest(
            f"the model's vocabulary has no token for '{form.end}': its reasoning cannot have a"
            " budget or precede a structured answer",
            param=param if sampling.grammar is None else None,
        )
    # A call that ends the reasoning is part of the grammar's text. The call's first line is a
    # token.
    calls = [call.partition("\n")[0] for call in form.calls_end_it]
    calls = [] if sampling.grammar is not None else calls
    return ReasoningSpan(
        ends=(end, *(ids for ids in map(marker_ids, calls) if ids)),
        start=start,
        budget=None if budget is None else min(budget, sampling.max_tokens),
        forced=end,
    )
