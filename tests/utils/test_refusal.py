import pytest

from trinity.utils.refusal import reason_of


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"error": {"message": "no such model", "type": "t"}}', "no such model"),
        ('{"error": "no such model"}', "no such model"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"error": {"type": "t"}}', '{"error": {"type": "t"}}'),
        ("<h1>Bad Gateway</h1>", "<h1>Bad Gateway</h1>"),
        ('["error"]', '["error"]'),
        ("12", "12"),
        ("", ""),
    ],
)
def test_what_the_service_says_whatever_form_it_has(body, reason):
    assert reason_of(body) == reason
