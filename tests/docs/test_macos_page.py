from tests.docs.macos_page import PAGE, page


def test_the_page_about_macs_is_that_of_the_steps() -> None:
    assert PAGE.read_text() == page(), "python -m tests.docs.macos_page writes it"
