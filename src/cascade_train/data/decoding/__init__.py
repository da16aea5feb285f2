"""From encoded pictures to framed pixels."""
