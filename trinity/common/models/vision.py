"""Images of a conversation: found in messages, decoded, and as tensors for the model.

Models are taken whose images all have the same number of tokens (LLaVA and its like). A picture is
never fetched from the network.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trinity.common.extras import needed
from trinity.common.models.messages import Messages, image_of_part

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS = "pixel_values"
"""Key of an experience's ``multi_modal_inputs``: [images, channels, height, width]."""


class Vision:
    """What a model folder says of images; read when first needed."""

    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        self._path = model_path
        self._trust_remote_code = trust_remote_code

    @property
    def token_id(self) -> int:
        """The token that stands for a piece of an image."""
        return int(self._config.image_token_id)

    @property
    def num_tokens(self) -> int:
        """Tokens of one image."""
        return int(self._config.image_seq_length)

    def expanded(self, token_ids: Sequence[int]) -> list[int]:
        """Token ids with each mark of an image as the tokens of that image."""
        mark, count = self.token_id, self.num_tokens
        return [copy for token in token_ids for copy in [token] * (count if token == mark else 1)]

    def pixels(self, messages: Messages, token_ids: Sequence[int]) -> Tensor | None:
        """[images, channels, height, width] of the images in ``messages``; None without one.

        Raises:
            ValueError: They are not as many as ``token_ids`` have room for, or can't be decoded.
        """
        images = images_in(messages)
        wanted = sum(token == self.token_id for token in token_ids)
        if wanted != len(images) * self.num_tokens:
            raise ValueError(
                f"The prompt has {len(images)} images, but marks for {wanted / self.num_tokens:g}: "
                "is the text of an image mark in it?"
            )
        if not images:
            return None
        found = self._processor(images=[load_image(image) for image in images], return_tensors="pt")
        pixels: Tensor = found[PIXELS]
        return pixels.to(torch.float32)

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._path, trust_remote_code=self._trust_remote_code)
        missing = [n for n in ("image_token_id", "image_seq_length") if not hasattr(config, n)]
        if missing:
            raise ValueError(
                f"{self._path!r} is of type {config.model_type!r}, which has no {missing[0]}: only "
                "models with a fixed number of tokens an image are trained with images."
            )
        return config

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(
            self._path, trust_remote_code=self._trust_remote_code
        )

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_config", "_processor")
        }


def images_in(messages: Messages) -> list[object]:
    """The images of a conversation, in order."""
    parts = [
        part
        for message in messages
        if not isinstance(message.get("content"), str)
        for part in message.get("content") or ()
    ]
    return [image for part in parts if (image := image_of_part(part)) is not None]


def load_image(source: object) -> Image:
    """A picture from what a row or a client has: bytes, a file, a ``data:`` address, an image.

    Raises:
        ValueError: It is none of these, or no picture.
    """
    pillow = needed("PIL.Image", "vision", "images", package="pillow")
    if isinstance(source, pillow.Image):
        return source.convert("RGB")
    if isinstance(source, Mapping):  # as `datasets` stores images
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and source.startswith("data:"):
        source = base64.b64decode(source.partition(",")[2], validate=True)
    if isinstance(source, str) and "://" in source:
        raise ValueError(f"{source[:80]!r} is in the network; give a file or the bytes.")
    if not isinstance(source, (str, bytes)):
        raise ValueError(f"An image can't be read from a {type(source).__name__}.")
    try:
        with pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert("RGB")
    except (OSError, pillow.UnidentifiedImageError, pillow.DecompressionBombError) as error:
        raise ValueError(f"An image can't be read: {error}") from error
