"""Frames of videos: animated pictures, files that PyAV decodes, lists of pictures."""

import io
from pathlib import Path

import pytest

from trinity.common.config.buffer import FormatConfig
from trinity.common.models.fake import FakeModel
from trinity.common.models.video import frames_of
from trinity.common.models.vision import load_image
from trinity.common.workflows import Task

Image = pytest.importorskip("PIL.Image")

COLORS = [(20 * number, 0, 0) for number in range(10)]


def animation() -> bytes:
    first, *rest = (Image.new("RGB", (16, 16), color) for color in COLORS)
    out = io.BytesIO()
    first.save(out, "WEBP", save_all=True, append_images=rest, duration=100, lossless=True)
    return out.getvalue()


def film(path: Path) -> Path:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for color in COLORS:
            frame = av.VideoFrame.from_image(Image.new("RGB", (32, 32), color))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def reds(frames: list[object]) -> list[int]:
    return [load_image(frame).getpixel((8, 8))[0] for frame in frames]


def test_frames_of_an_animation_are_at_even_distances():
    assert reds(frames_of(animation(), 2)) == [40, 140]
    assert reds(frames_of({"bytes": animation()}, 5)) == [20, 60, 100, 140, 180]
    assert len(frames_of(animation(), 99)) == 10


def test_a_film_is_decoded(tmp_path: Path):
    path = film(tmp_path / "film.mp4")
    for source in (str(path), path.read_bytes(), {"path": str(path)}):
        assert reds(frames_of(source, 5)) == pytest.approx([20, 60, 100, 140, 180], abs=8)


def test_a_list_of_pictures_is_a_video():
    assert frames_of(["a.png", "b.png", "c.png"], 1) == ["b.png"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("http://x/y.mp4", "in the network"),
        (3, "from a int"),
        ("/no/such.mp4", "can't be read"),
        (b"no video at all" * 20, "can't be read"),
    ],
)
def test_what_is_no_video_is_told(source: object, reason: str):
    pytest.importorskip("av")
    with pytest.raises(ValueError, match=reason):
        frames_of(source, 2)


def asked(prompt: str, **columns: object) -> list:
    task = Task(
        workflow="simple_mm_workflow",
        reward_fn="math_reward",
        raw_task={"q": prompt, **columns},
        format_args=FormatConfig(prompt_key="q", image_key="image", video_key="video"),
        workflow_args={"num_frames": 2},
    )
    return task.to_workflow(FakeModel([])).format_messages()[-1]["content"]


def test_the_workflow_shows_frames_where_the_prompt_has_its_mark():
    content = asked("See <image> and <video>?", image="a.png", video=animation())
    assert [part["type"] for part in content] == ["text", "image", "text", "image", "image", "text"]
    assert content[1]["image"] == "a.png"
    assert reds([content[3]["image"], content[4]["image"]]) == [40, 140]
    content = asked("What is it?", video=animation())
    assert [part["type"] for part in content] == ["image", "image", "text"]


def test_marks_and_videos_must_be_as_many():
    with pytest.raises(ValueError, match="2 <video> marks, the row 1 videos"):
        asked("<video> or <video>?", video=animation())
    with pytest.raises(ValueError, match=r"no image in the column.*set format\.image_key"):
        asked("What is it?")
