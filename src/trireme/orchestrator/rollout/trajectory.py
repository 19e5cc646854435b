"""The tokens of one rollout, turn by turn: what the engine was given and what it sampled, never tokenised again.

The sample that a turn's tokens belong to:
- `interleaved`: a turn whose conversation continues an earlier one goes into that one's sample; only the text in
  between (a tool's answer, for example) is tokenised. A turn whose earlier ones the chat template rewrites begins a
  sample.
- `branching`: each turn is a sample of its own, with the conversation before it as its prompt.
- With either, a conversation that continues no earlier one begins a sample: the first one, one that the environment
  changed or asked in parallel to another, one with other tools or other variables of the chat template.
- `tolerant`, for agent programs: as `interleaved`, but a turn is recognised although the program changed what it sends
  back (`is_like`), the sampled tokens stay even if a template rewrites earlier turns, and a conversation
  that leaves an earlier one after any of its turns begins a sample with that one's tokens.
- Agent runs of one rollout (`trace`) never continue each other's conversations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jinja2
import msgspec
import numpy as np

from trireme.algo.pictures import expand
from trireme.journal.message_text import content_text, pictures_in
from trireme.journal.model_turn import Message, Turn, is_like, is_same
from trireme.journal.records import AgentRun, Branch
from trireme.journal.turns import PromptDigests
from trireme.messages import Kept, Picture, Tokens, TopLogprobs, build_tokens
from trireme.orchestrator.engines.expert_routes import to_routed
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.continuation import MARK, Continuation, Rewritten
from trireme.orchestrator.rollout.pictures import ConversationPictures

Strategy = Literal["interleaved", "branching", "tolerant"]


@dataclass
class _Sample:
    """One sample in the making."""

    tools: list[dict] | None
    branch: Branch
    trace: str  # the agent run that it belongs to
    template_kwargs: dict[str, Any]  # variables that the chat template was given
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)  # oldest version that each attended to
    has_oldest: bool = False  # some engine kept caches, so that `oldest` may differ from `versions`
    kept: list[Sequence[int]] = field(default_factory=list)  # tokens that each was chosen from; empty: all
    top: list[dict[int, float]] = field(default_factory=list)  # likeliest tokens at each place, if the loss needs them
    ce_weights: list[float] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # expert routes per turn: [N, layers, experts]
    pictures: list[Picture] = field(default_factory=list)  # in the order of their places
    last: _Place | None = None
    is_kept: bool = True  # trained on

    @property
    def length(self) -> int:
        return len(self.ids)

    def add_given(self, ids: list[int], ce_weights: Sequence[float] = ()) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.oldest += [-1] * len(ids)
        self.kept += [()] * len(ids)
        self.top += [{}] * len(ids)
        self.ce_weights += ce_weights or [0.0] * len(ids)

    def add_sampled(self, turn: Turn, ce_weight: float) -> None:
        self.ids += turn.ids
        self.mask += [1] * len(turn.ids)
        self.logprobs += turn.logprobs
        self.versions += turn.versions
        self.oldest += turn.versions if turn.oldest is None else [turn.oldest] * len(turn.ids)
        self.has_oldest |= turn.oldest is not None
        self.kept += turn.kept or [()] * len(turn.ids)
        self.top += turn.top_logprobs or [{}] * len(turn.ids)
        self.ce_weights += [ce_weight] * len(turn.ids)

    def to_tokens(self) -> Tokens:
        """Build the columns. Advantages are 0 until the group is known."""
        kept = None
        if any(self.kept):
            counts = np.array([len(ids) for ids in self.kept], dtype=np.int32)
            kept = Kept(counts, np.array([token for ids in self.kept for token in ids], dtype=np.int32))
        return build_tokens(
            ids=self.ids,
            loss_mask=self.mask,
            logprobs=self.logprobs,
            advantages=[0.0] * self.length,
            versions=self.versions,
            kept=kept,
            routed=to_routed(self.routes, self.length),
            pictures=self.pictures,
            top_logprobs=_flat(self.top) if any(self.top) else None,
            ce_weights=np.array(self.ce_weights, np.float32) if any(self.ce_weights) else None,
            oldest=np.array(self.oldest, np.int32) if self.has_oldest else None,
        )


def _flat(top: list[dict[int, float]]) -> TopLogprobs:
    counts = np.array([len(each) for each in top], dtype=np.int32)
    ids = np.array([token for each in top for token in each], dtype=np.int32)
    return TopLogprobs(counts, ids, np.array([value for each in top for value in each.values()], dtype=np.float32))


@dataclass(frozen=True)
class _Place:
    """One turn of the model: the place of its tokens, and the conversation that it ends."""

    sample: _Sample
    begin: int
    end: int
    messages: list[dict[str, Any]]  # the conversation before it
    said: Message  # the turn as the environment was shown it
    earlier: dict[int, Message]  # earlier turns of the conversation, by their place in `messages`
    oldest: int | None = None  # oldest version that it, or an earlier turn of its sample, attended to, if known

    def continued_by(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict] | None,
        template_kwargs: dict[str, Any],
        *,
        tolerant: bool,
    ) -> list[dict[str, Any]] | None:
        """Return the conversation, with the model's turns as they were answered; None if it does not continue this."""
        past = len(self.messages)
        if len(messages) <= past or (tools or None) != self.sample.tools:
            return None
        if template_kwargs != self.sample.template_kwargs:  # they may change how the prompt begins
            return None
        # an environment returns turns as it got them; an agent program may have changed them a little
        if not tolerant:
            return messages if messages[:past] == self.messages and is_same(self.said, messages[past]) else None
        if not is_like(self.said, messages[past]) or self.num_shared(messages) <= past:
            return None
        # the model's own form of its turns: the program's would be rendered to other tokens than were sampled
        return [*self.messages, self.said, *messages[past + 1 :]]

    def num_shared(self, messages: list[dict[str, Any]]) -> int:
        """Return how many messages a conversation has in common with this one, up to and with this turn."""
        for place, given in enumerate(messages):
            known, said = self.messages[place : place + 1], self.said_at(place)
            if known != [given] and (said is None or not is_like(said, given)):
                return place
        return len(messages)

    def said_at(self, place: int) -> Message | None:
        return self.said if place == len(self.messages) else self.earlier.get(place)


@dataclass(frozen=True)
class Prompt:
    """A turn that the engine is asked for. It becomes part of a sample only when there is an answer."""

    number: int  # place among all turns that were asked for, from 0
    ids: list[int]  # the whole prompt, with one token for each block of a picture
    messages: list[dict[str, Any]]
    tools: list[dict] | None
    trace: str
    turn: _Place | None  # the turn that it continues
    pictures: tuple[Picture, ...] = ()  # all pictures of the prompt
    routes: tuple[np.ndarray, ...] = ()  # routes of the first of `ids`, which the engine reported in earlier turns
    rewritten: str = ""  # how the chat template changes the turn that the conversation continues; empty: it does not
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    ce_weights: Sequence[float] = ()  # weights of the tokens after `turn`; empty: none has one
    since: int | None = None  # oldest version that the conversation has attended to; None if not known or at its begin

    @property
    def routes_from(self) -> int:
        """The first token of `ids` whose routes are not known yet."""
        return sum(len(chunk) for chunk in self.routes)


@dataclass
class Trajectory:
    """All samples of one rollout."""

    tokenizer: ChatTokenizer
    strategy: Strategy
    pictures: ConversationPictures | None = None  # pictures of the run; if not given, pictures are no tokens
    max_model_len: int | None = None  # prompts that are far longer are refused
    teacher_weight: float = 0.0  # weight of the turns' tokens in the cross-entropy, if a teacher samples them
    echo: Mapping[str, float] = field(default_factory=dict)  # weight of the tokens that each role said, likewise
    _samples: list[_Sample] = field(default_factory=list)
    _turns: dict[int, _Place] = field(default_factory=dict)  # keyed by the number of their prompt
    _num_asked: int = 0
    num_rewritten: int = 0  # turns that begin a sample because the chat template rewrites earlier ones
    num_computed: int | None = 0  # tokens that engines computed for its turns; None if an engine did not say
    taken_back: list[str] = field(default_factory=list)  # digests of the prompts of turns that were taken back

    @property
    def num_turns(self) -> int:
        """Turns of the model."""
        return len(self._turns)

    def ask(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict] | None,
        trace: str = "",
        template_kwargs: dict[str, Any] | None = None,
    ) -> Prompt:
        """Build the prompt of the next turn, from what `read_messages` returns. Several may be asked for at once.

        Raises:
            ValueError: the chat template has another number of placeholders than there are pictures.
            PromptTooLong: see `ChatTokenizer.encode`.
        """
        number, self._num_asked = self._num_asked, self._num_asked + 1
        given, rewritten = template_kwargs or {}, ""

        # sampled tokens are never tokenised again: only the text after the earlier turn is new
        turn, conversation = self._find_turn(messages, tools, trace, given)
        since = None if turn is None else turn.oldest
        if turn is not None:
            try:
                text = self._text_after(turn, conversation, tools or None)
                past = turn.sample.ids[: turn.end]
                ids = self.tokenizer.encode(text, self.max_model_len)
                more, new = self._expand(ids, conversation[len(turn.messages) + 1 :], turn.end)
                known = [picture for picture in turn.sample.pictures if picture.place < turn.end]
                # routes are kept up to a sample's newest turn, so a branch from an earlier turn asks for all of its own
                routes = tuple(turn.sample.routes) if turn is turn.sample.last else ()
                pictures = (*known, *new)
                more_of: dict[str, Any] = {"template_kwargs": given, "since": since}
                if self.echo:
                    more_of["ce_weights"] = self._weights(text, turn, conversation, tools or None)
                return Prompt(number, past + more, conversation, tools, trace, turn, pictures, routes, **more_of)
            except Rewritten as error:
                rewritten = str(error)

        # the whole conversation as the template renders it now; the first prompt is the same for a whole group
        if number == 0:
            ids = self.tokenizer.prompt_ids(
                messages, tools=tools, most_tokens=self.max_model_len, template_kwargs=given
            )
        else:
            text = self.tokenizer.render(messages, tools=tools, generate=True, template_kwargs=given)
            ids = self.tokenizer.encode(text, self.max_model_len)
        ids, shown = self._expand(ids, messages, 0)
        more_of = {"template_kwargs": given, "since": since}
        return Prompt(number, ids, messages, tools, trace, None, tuple(shown), rewritten=rewritten, **more_of)

    def _expand(self, ids: list[int], messages: list[dict[str, Any]], begin: int) -> tuple[list[int], list[Picture]]:
        """Return a part of a prompt with all tokens of its pictures, and their places in the prompt.

        Args:
            messages: those whose pictures have a placeholder in `ids`.
            begin: place of the part in the prompt.
        """
        if self.pictures is None or not (digests := pictures_in(messages)):
            return ids, []
        grids = [(digest, *self.pictures.grid(digest)) for digest in digests]
        whole, pictures = expand(ids, self.pictures.rules.token, grids)
        return whole, [msgspec.structs.replace(each, place=begin + each.place) for each in pictures]

    def release(self) -> None:
        """Let samples and turns, which hold each other, be freed at once: garbage is collected rarely."""
        for sample in self._samples:
            sample.last = None

    def refuse(self) -> None:
        """Count a turn that was asked for and has no prompt."""
        self._num_asked += 1

    def _find_turn(
        self, messages: list[dict[str, Any]], tools: list[dict] | None, trace: str, template_kwargs: dict[str, Any]
    ) -> tuple[_Place | None, list[dict[str, Any]]]:
        """Return the turn that a conversation continues, and the conversation as the model knows it."""
        # a program may go back to any turn, so the one with the longest conversation counts; otherwise a conversation
        # only grows at the end of a sample
        tolerant = self.strategy == "tolerant"
        if tolerant:
            turns = sorted(self._turns.values(), key=lambda turn: len(turn.messages))
        else:
            turns = [sample.last for sample in self._samples if sample.last] if self.strategy != "branching" else []
        for turn in reversed([turn for turn in turns if turn.sample.trace == trace]):
            conversation = turn.continued_by(messages, tools, template_kwargs, tolerant=tolerant)
            if conversation is not None:
                return turn, conversation
        return None, messages

    def _text_after(self, turn: _Place, messages: list[dict[str, Any]], tools: list[dict] | None) -> str:
        """Return the text between a turn and the next. Raises: Rewritten."""
        sampled = turn.sample.ids[turn.begin : turn.end]
        given = turn.sample.template_kwargs
        continuation = Continuation(self.tokenizer, messages, len(turn.messages), sampled, tools, given)
        try:
            return continuation.text_after(turn.said)
        except Rewritten:
            # `tolerant` keeps the sampled tokens even under a template that would rewrite them
            if self.strategy != "tolerant":
                raise
            return continuation.text_after_any_turn()

    def _weights(
        self, text: str, turn: _Place, messages: list[dict[str, Any]], tools: list[dict] | None
    ) -> list[float]:
        """Return the weight of each token of the `text` after a turn; nothing if none has one."""
        past = len(turn.messages) + 1
        said = [(content_text(message.get("content")), message) for message in messages[past:]]

        # the template writes the same around other contents
        marked = [message | {"content": MARK} if content else message for content, message in said]
        try:
            around = self._text_after(turn, [*messages[:past], *marked], tools).split(MARK)
        except (Rewritten, jinja2.TemplateError):  # it reads what it is given
            return []
        contents = [(content, self.echo.get(message["role"], 0.0)) for content, message in said if content]
        return self.tokenizer.weigh(text, around, contents)

    def record(self, prompt: Prompt, turn: Turn) -> None:
        """Add a turn: the tokens that the engine sampled, and the message that the environment is shown."""
        if self.num_computed is not None:
            self.num_computed = None if turn.num_computed is None else self.num_computed + turn.num_computed
        earlier = prompt.turn
        said_before = {} if earlier is None else earlier.earlier | {len(earlier.messages): earlier.said}

        # the earlier turn's sample grows by what was given since, and by this turn
        if earlier is not None and earlier.end == earlier.sample.length:
            sample = earlier.sample
            sample.add_given(prompt.ids[earlier.end :], prompt.ce_weights)
        else:  # a conversation of its own, or one that leaves an earlier one before its end
            branch, given = self._begin_branch(prompt), prompt.template_kwargs
            sample = _Sample(prompt.tools or None, branch, prompt.trace, given)
            self._samples.append(sample)
            self.num_rewritten += bool(prompt.rewritten)
            known = 0 if earlier is None else earlier.end  # these tokens are in the sample that they leave
            sample.add_given(prompt.ids[:known])
            sample.add_given(prompt.ids[known:], prompt.ce_weights)

        sample.pictures = list(prompt.pictures)
        begin = sample.length
        sample.branch.num_turns += 1
        sample.add_sampled(turn, self.teacher_weight)
        # routes of a prompt are reported only from `routes_from` on, so those from before are put in front
        if turn.routes is not None:
            sample.routes = [*prompt.routes, turn.routes]
        oldest = turn.oldest
        if oldest is not None and earlier is not None and earlier.sample is sample and earlier.oldest is not None:
            oldest = min(oldest, earlier.oldest)
        sample.last = _Place(sample, begin, sample.length, prompt.messages, turn.message, said_before, oldest)
        self._turns[prompt.number] = sample.last

    def take_back(self, number: int) -> None:
        """Remove a turn that was not received, if it ends its sample. Numbers of turns stay the same."""
        turn = self._turns[number]
        sample = turn.sample
        # tokens of a later turn were sampled after it, so it has to stay
        if turn is not sample.last:
            return

        # `RolloutLog` has this turn on disk; the digest of its prompt says later why no sample has it
        self.taken_back.append(PromptDigests(sample.ids, sample.pictures).before(turn.begin))
        del self._turns[number]

        # the sample ends with its previous turn again, without what was given to the one that is removed
        end = 0  # number of tokens that stay
        for earlier in (each for each in self._turns.values() if each.sample is sample):
            sample.last, end = earlier, earlier.end
        columns = (sample.ids, sample.mask, sample.logprobs, sample.versions, sample.kept, sample.top)
        for column in (*columns, sample.ce_weights, sample.oldest):
            del column[end:]
        sample.routes = sample.routes[:-1]
        sample.pictures = [picture for picture in sample.pictures if picture.place < end]
        sample.branch.num_turns -= 1

    def _begin_branch(self, prompt: Prompt) -> Branch:
        """Return why a request of an agent program begins a sample, by the conversation that it is most like."""
        messages, tools = prompt.messages, prompt.tools or None
        branch = Branch(why="first request", num_tools=len(tools or ()))

        lasts = [each.last for each in self._samples if each.last is not None and each.trace == prompt.trace]
        if not lasts or self.strategy != "tolerant":
            return branch

        # the conversation with the most messages in common; among equals, the one with the same tools
        nearest = max(lasts, key=lambda turn: (turn.num_shared(messages), turn.sample.tools == tools))
        place = nearest.num_shared(messages)
        # a system prompt alone is shared by all conversations of a program, and makes none the branch of another
        if all(message.get("role") in ("system", "developer") for message in messages[:place]):
            branch.why = "new conversation"
            return branch

        # the first difference that kept this request from continuing that conversation
        branch.parent, branch.place = self._samples.index(nearest.sample), place
        following = [message.get("role") for message in messages[place:]]
        if tools != nearest.sample.tools:
            branch.why = "other tools"
        elif prompt.template_kwargs != nearest.sample.template_kwargs:
            branch.why = "other template variables"
        elif prompt.rewritten:
            branch.why = "chat template"
        elif not following:
            branch.why = "same request again"
        elif nearest.said_at(place) is not None:
            branch.why = "turn edited" if following[0] == "assistant" else "turn dropped"
        else:
            branch.why = "history edited" if "assistant" in following else "earlier turn continued"
        return branch

    def branches(self, *, has_transcript: bool = True) -> list[Branch]:
        """Return the conversations, in the order of their first turns.

        Args:
            has_transcript: the rollout has the messages of the longest one, so they are left out here.
        """
        newest_first = list(self._turns.values())[::-1]
        longest = max(newest_first, key=lambda turn: len(turn.messages), default=None)
        lasts = [(sample, sample.last) for sample in self._samples if sample.last is not None]
        trained = self._trained()
        # the messages of the longest are in the transcript; of each other one, those after it left its parent are kept
        for sample, last in lasts:
            sample.branch.sample = next((place for place, each in enumerate(trained) if each is sample), -1)
            is_transcript = has_transcript and longest is not None and longest.sample is sample
            if len(lasts) > 1 and not is_transcript:
                sample.branch.messages = [*last.messages[sample.branch.place :], last.said]
        return [sample.branch for sample, _ in lasts]

    def prompts(self) -> dict[bool, list[str]]:
        """Return the digests of the prompts of all turns: of those that are trained on (True), and of the others."""
        trained = {id(sample) for sample in self._trained()}
        digests = {id(sample): PromptDigests(sample.ids, sample.pictures) for sample in self._samples}
        found: dict[bool, list[str]] = {True: [], False: []}
        for turn in self._turns.values():  # those of a sample are in the order of its tokens
            found[id(turn.sample) in trained].append(digests[id(turn.sample)].before(turn.begin))
        return found

    def samples(self) -> list[Tokens]:
        """Return the samples that the model took part in, in the order of their first turns."""
        return [sample.to_tokens() for sample in self._trained()]

    def _trained(self) -> list[_Sample]:
        return [sample for sample in self._samples if sample.is_kept and any(sample.mask)]

    def keep(self, which: Literal["all", "main", "last"], *, only_with_tools: bool) -> None:
        """Leave out samples that are not to be trained on: all but the one with the most turns, or the newest turn."""
        newest = {id(sample): number for number, turn in sorted(self._turns.items()) for sample in [turn.sample]}
        kept = [sample for sample in self._samples if sample.ids and (sample.tools or not only_with_tools)]

        if which != "all" and kept:
            num_turns = Counter(id(turn.sample) for turn in self._turns.values())
            kept = [max(kept, key=lambda sample: (num_turns if which == "main" else newest)[id(sample)])]
        for sample in self._samples:
            sample.is_kept = any(sample is each for each in kept)

    def keep_runs(self, runs: list[AgentRun]) -> list[AgentRun]:
        """Leave out samples of other agent runs. Return these with the samples that each has; none without one."""
        traces = {run.trace for run in runs}
        for sample in self._samples:
            sample.is_kept = sample.is_kept and sample.trace in traces
        owners = [sample.trace for sample in self._trained()]
        places = {trace: [place for place, owner in enumerate(owners) if owner == trace] for trace in traces}
        found = [AgentRun(agent=run.agent, reward=run.reward, samples=places[run.trace]) for run in runs]
        return [run for run in found if run.samples]

    def prompt_ids(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict] | None,
        trace: str,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt that a turn would have. Raises: as `ask`."""
        # counting a prompt is no turn: the numbers of turns stay as they are
        number = self._num_asked
        try:
            return self.ask(messages, tools, trace, template_kwargs).ids
        finally:
            self._num_asked = number

    def token_rewards(self, turn_rewards: list[list[float]]) -> list[np.ndarray]:
        """Return [T] float32 per sample: rewards (see `wire.Done`) at their tokens, NaN elsewhere. Empty without any.

        Raises: ValueError if a turn has another number of tokens.
        """
        if not any(turn_rewards):
            return []
        columns = {id(sample): np.full(sample.length, np.nan, dtype=np.float32) for sample in self._samples}
        for number, rewards in enumerate(turn_rewards):
            if not rewards:
                continue

            turn = self._turns.get(number)
            num_tokens = turn.end - turn.begin if turn else 0
            if turn is None or num_tokens == 0 or len(rewards) not in (1, num_tokens):
                raise ValueError(
                    f"turn {number + 1} was given {len(rewards)} rewards and has {num_tokens} tokens - "
                    "expected one reward for the whole turn, or one per token - look at its `turn_rewards`"
                )
            # one reward lands on the turn's last token, a list on all of its tokens
            columns[id(turn.sample)][turn.end - len(rewards) : turn.end] = rewards
        return [columns[id(sample)] for sample in self._trained()]
