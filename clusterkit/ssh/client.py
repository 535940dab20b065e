"""Our side of a login: which host key we accept, and which keys and passwords we offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import asyncssh

from clusterkit.ssh import known_hosts
from clusterkit.ssh.api import HostError
from clusterkit.ssh.endpoint import Endpoint
from clusterkit.ssh.keys import Offers
from clusterkit.ssh.options import SshOptions


class Client(asyncssh.SSHClient):
    """One attempt to log in. Its attributes explain a failure.

    Args:
        paused: entered while the user answers a question, so that the attempt's time limit does not run.
        progressed: called when a part of the login is done, so that the next one has the whole time limit.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: SshOptions,
        known: known_hosts.Known,
        offers: Offers,
        password: str | None,
        paused: Callable[[], AbstractContextManager[None]],
        progressed: Callable[[], None],
    ) -> None:
        self._endpoint, self._options, self._known = endpoint, options, known
        self._paused, self._progressed = paused, progressed
        self._offers, self._password = list(offers.pairs), password
        self._password_left = self._interactive_left = password is not None
        self._new_key: asyncssh.SSHKey | None = None
        self._connection: asyncssh.SSHClientConnection | None = None
        self.reached = False  # the host's port was open
        self.verified = False  # the host has proved that it owns a key that we accept
        self.problem: HostError | None = None
        self.tried: list[str] = []
        self.offered: list[str] = []  # methods that the host accepts

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        """The port is open."""
        self._connection, self.reached = conn, True
        self._progressed()

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:  # noqa: ARG002
        """Accept or refuse a key that is in no known_hosts file."""
        self.problem = known_hosts.judge(self._endpoint, self._options, self._known, key)
        self._new_key = key
        return self.problem is None

    def begin_auth(self, username: str) -> None:  # noqa: ARG002
        """Save the new key: only now has the host proved that it owns it."""
        self.verified = True
        self._progressed()
        if self._new_key is not None and not self._endpoint.host_key:
            try:
                known_hosts.remember(self._endpoint, self._options, self._new_key)
            except HostError as error:
                self.problem = error
                raise asyncssh.HostKeyNotVerifiable(error.message) from None

    def public_key_auth_requested(self) -> asyncssh.SSHKeyPair | None:
        """Offer the next key."""
        self._note_methods()
        if not self._offers:
            return None
        pair, description = self._offers.pop(0)
        self.tried.append(description)
        return pair

    def password_auth_requested(self) -> str | None:
        """Offer the password, once."""
        self._note_methods()
        if not self._password_left:
            return None
        self._password_left = False
        self.tried.append("the password")
        return self._password

    def kbdint_auth_requested(self) -> str | None:
        """Agree to answer questions where there is a password."""
        self._note_methods()
        if not self._interactive_left:
            return None
        self._interactive_left = False
        self.tried.append("answers to the host's questions")
        return ""

    async def kbdint_challenge_received(
        self,
        name: str,  # noqa: ARG002
        instructions: str,  # noqa: ARG002
        lang: str,  # noqa: ARG002
        prompts: Sequence[tuple[str, bool]],
    ) -> list[str]:
        """Answer the question for the password; ask the user all others (one-time codes)."""
        answers = []
        for prompt, _ in prompts:
            if "password" in prompt.lower() and self._password is not None:
                answers.append(self._password)
                continue
            with self._paused():  # a one-time code is valid once, so the key is unique to this attempt
                reply = self._options.secrets.answer(f"{self._endpoint.name}: {prompt}", key=f"{id(self)} {prompt}")
                answers.append(await reply)
        return answers

    def _note_methods(self) -> None:
        if self._connection is not None:
            for method in self._connection.get_server_auth_methods():
                if method not in self.offered:
                    self.offered.append(method)
