"""Chat messages to a prompt: by the tokenizer's own template, or by a plain fallback where it has none.

The fallback, for models that were not trained on chats: one user message is the prompt as it stands; several messages
become ``role: text`` paragraphs, and the last line is ``assistant:``.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError

from decoder.text import Text

ROLES = ("system", "developer", "user", "assistant", "tool")


class Chat:
    """Turns messages (``{"role", "content"}``, content as text) into the token ids of a prompt."""

    def __init__(self, text: Text):
        self._text = text
        self.templated = bool(getattr(text.tokenizer, "chat_template", None))

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of the prompt; raises ValueError for messages that the template refuses."""
        if not messages:
            raise ValueError("messages must not be empty")
        if not self.templated:
            return self._text.encode(plain(messages))
        try:
            rendered: str = self._text.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as e:
            raise ValueError(f"the model's chat template refuses these messages: {e}") from e
        return self._text.encode(rendered, special=False)


def plain(messages: Sequence[dict[str, str]]) -> str:
    """The fallback's prompt."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "\n\n".join([*(f"{m['role']}: {m['content']}" for m in messages), "assistant:"])
