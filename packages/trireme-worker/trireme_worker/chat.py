"""The harness of a v1 environment that brings none: asks the model in this process, and starts no program for it.

A plugin of verifiers, which finds it by the name `trireme_chat`. If a task has tools, verifiers' own chat program
(`null`) runs them; it needs `uv`, and an installation of its own which uv caches.
"""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses import NullHarness, NullHarnessConfig

__all__ = ["ChatHarness"]

FULL = "context_length_exceeded"


class ChatHarnessConfig(NullHarnessConfig):
    id: str = "trireme_chat"


class ChatHarness(NullHarness, vf.Harness[ChatHarnessConfig]):
    """Asks for one answer to the conversation so far; the caller drives the conversation."""

    async def setup(self, runtime: vf.Runtime) -> None:
        """Do nothing: verifiers' own program is prepared only if it is used."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        if mcp_urls:
            return await super().launch(
                ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=tool_interception_url
            )

        system, prompt = self.resolve_prompt(data)
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages = [*([vf.SystemMessage(content=system)] if system else []), *said]
        request = {"model": ctx.model, "messages": [message_to_wire(message) for message in messages]}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions", json=request, headers={"Authorization": f"Bearer {secret}"}
            )

        # a conversation that has begun ends well once it no longer fits; a first prompt that does not fit is an error
        is_full = trace.num_turns > 0 and FULL in answer.text
        failed = answer.is_error and not is_full
        return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=answer.text if failed else "")
