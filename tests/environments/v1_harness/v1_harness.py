"""A harness of verifiers 0.4, which is no environment: it asks once, in the dialect of one of the SDKs."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses import NullHarness, NullHarnessConfig


class ToyConfig(NullHarnessConfig):
    id: str = "v1_harness"
    dialect: str = "responses"


class ToyHarness(NullHarness, vf.Harness[ToyConfig]):
    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        said, system = [{"role": "user", "content": data.prompt_text}], data.system_prompt
        if self.config.dialect == "responses":
            body = {"model": ctx.model, "input": said, "instructions": system}
        else:
            body = {"model": ctx.model, "messages": said, "system": system, "max_tokens": 9}
        headers = {"authorization": f"Bearer {secret}", "x-api-key": secret}
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(f"{endpoint}/{self.config.dialect}", json=body, headers=headers)
        return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text)


assert issubclass(ToyHarness, vf.Harness)
__all__ = ["ToyHarness"]
