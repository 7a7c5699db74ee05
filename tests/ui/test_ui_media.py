"""Content tells images from audio, a message may hold both, and what the model does not take is refused in words."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from engine.request import AudioPart, ImagePart, Message, TextPart
from tests.media_models import picture
from tests.ui.live import write_tone
from ui.conversation import Conversation
from ui.media import modality_of
from ui.message_check import message_problem
from ui.text import Texts

TEXT = Texts()


def image_file(path: Path, kind: str) -> Path:
    content = io.BytesIO()
    picture().save(content, kind)
    path.write_bytes(content.getvalue())
    return path


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_is_one_whatever_its_name(kind: str, tmp_path: Path) -> None:
    assert modality_of(image_file(tmp_path / "clip.wav", kind)) == "image"


def test_sound_is_audio_whatever_its_name_and_a_broken_image_stays_one(tmp_path: Path) -> None:
    assert modality_of(write_tone(tmp_path / "clip.bin")) == "audio"
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no pixels")
    assert modality_of(broken) == "image" and modality_of(Path("gone.wav")) == "audio"


def test_both_kinds_go_to_the_model_in_their_order_and_are_told_apart(tmp_path: Path) -> None:
    clip, image = write_tone(tmp_path / "a.wav"), image_file(tmp_path / "b.png", "PNG")
    conversation = Conversation()
    conversation.begin("And this?", [image, clip])
    assert conversation.messages() == [
        Message("user", [ImagePart(image, param="b.png"), AudioPart(clip, param="a.wav"), TextPart("And this?")])
    ]
    reply = conversation.open_reply()
    assert (reply.new_media, reply.media) == ("audio+image", "audio+image")
    reply.phase = "done"
    conversation.begin("Why?", [image])
    reply = conversation.open_reply()
    assert (reply.new_media, reply.media) == ("image", "audio+image")


def test_a_model_gets_only_what_it_takes(tmp_path: Path) -> None:
    clip, image = write_tone(tmp_path / "a.wav"), image_file(tmp_path / "b.png", "PNG")
    both = {"audio", "image"}
    assert message_problem(TEXT, "", [clip, image], both) is None
    assert message_problem(TEXT, "x", [clip, image], {"audio"}) == (
        "b.png is not attached: this model takes no images, only text and audio."
    )
    assert message_problem(TEXT, "x", [clip], set()) == "a.wav is not attached: this model takes no audio, only text."
    assert message_problem(TEXT, "", [], set()) == "Write a message first."


def test_a_deleted_turn_leaves_the_prompt_and_can_be_put_back() -> None:
    conversation = Conversation()
    for number in ("One", "Two", "Three"):
        conversation.begin(number, ())
        reply = conversation.open_reply()
        reply.phase, reply.text = "done", number.lower()
    conversation.remove(1)
    assert [message.content for message in conversation.messages()] == ["One", "one", "Three", "three"]
    conversation.restore()
    conversation.restore()
    assert [turn.text for turn in conversation.turns] == ["One", "Two", "Three"]
    for nowhere in (-1, 3):
        conversation.remove(nowhere)
    assert len(conversation.turns) == 3
    conversation.remove(0)
    conversation.begin("Four", ())
    conversation.restore()
    assert [turn.text for turn in conversation.turns] == ["Two", "Three", "Four"]
