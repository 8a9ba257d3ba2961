"""Requests that are refused, with the words and the status for it."""

from starlette.responses import JSONResponse


class Refusal(Exception):  # noqa: N818 - it is said to the client, and no error of ours
    """What is wrong with a request, and what would be right.

    Args:
        status: of HTTP.
        words: for whoever sent it.
        after: seconds after which the same may be asked again.
    """

    def __init__(self, status: int, words: str, after: int | None = None) -> None:
        super().__init__(words)
        self.status, self.words, self.after = status, words, after

    def response(self) -> JSONResponse:
        """As it goes out."""
        headers = {} if self.after is None else {"Retry-After": str(self.after)}
        return JSONResponse({"error": self.words}, self.status, headers)
