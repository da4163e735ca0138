from trinity.utils.progress import Pace, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_left_follows_the_speed_since_the_first_came() -> None:
    clock = Clock()
    pace = Pace("evaluating gsm8k", 1319, clock)
    clock.now += 20
    line = "evaluating gsm8k: 0 of 1,319 samples   400 tokens/s   20 s so far"
    assert pace.line(0, 8000) == line
    clock.now += 20
    assert pace.line(16, 16000).endswith("40 s so far")
    clock.now += 20
    assert pace.line(32, 24000).endswith("400 tokens/s   about 27 min left")


def test_without_counts_the_time_is_told() -> None:
    clock = Clock()
    pace = Pace("step 3: in training", clock=clock)
    clock.now += 7
    assert pace.line() == "step 3: in training   7 s so far"


def test_lines_that_stay_come_after_ten_seconds_and_then_each_half_minute() -> None:
    clock = Clock()
    pace = Pace("step 1", 8, clock)
    due = []
    for second in range(1, 75):
        clock.now += 1
        if pace.is_line_due():
            due.append(second)
    assert due == [10, 40, 70]


def test_durations_are_as_exact_as_an_estimate() -> None:
    assert [duration(s) for s in (0.4, 99, 100, 5999, 9000)] == [
        "0 s",
        "99 s",
        "2 min",
        "100 min",
        "2.5 h",
    ]
