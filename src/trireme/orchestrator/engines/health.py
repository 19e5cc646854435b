"""Whether an engine is there: its server answers, or at least something listens."""

from __future__ import annotations

from urllib.parse import urlsplit

import aiohttp

from trireme.base.network import is_loopback

PATIENCE_S = 5.0


async def is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    """vLLM answers 503 here when its engine core is dead, though its HTTP server still stands."""
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(PATIENCE_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def is_listening(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether there is anything at its port. Another machine that does not even greet is off, or cut off."""
    try:
        timeout = aiohttp.ClientTimeout(PATIENCE_S, sock_connect=3)
        async with session.get(f"{url}/health", timeout=timeout):
            return True
    except aiohttp.ClientConnectorError:
        return False
    except aiohttp.ConnectionTimeoutError:
        return is_near(url)
    except (aiohttp.ClientError, TimeoutError):
        return True


def is_near(url: str) -> bool:
    """On this machine, reached without a cable."""
    return is_loopback(urlsplit(url).hostname or "")
