from trinity.utils.terminal import harmless


def test_control_characters_are_written_out():
    evil = "a\x1b]0;title\x07\x1b[2Jb\x9bc\r\x08\x7f\n\té ☃"
    assert harmless(evil) == "a\\x1b]0;title\\x07\\x1b[2Jb\\x9bc\\x0d\\x08\\x7f\n\té ☃"
