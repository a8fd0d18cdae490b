"""Leaves: each ends and starts runs where one kind of scheduler keeps them. ``scheduler`` says what one must do."""
