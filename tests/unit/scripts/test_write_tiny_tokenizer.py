from pathlib import Path

import pytest
from transformers import CLIPTokenizer

from cascade_train.models.text_encoder import PACKAGED_TOKENIZER
from scripts.write_tiny_tokenizer import WORD_END, WORDS, write


@pytest.fixture(scope="module")
def tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(PACKAGED_TOKENIZER)


def test_shipped_files_are_what_the_module_writes(tmp_path: Path) -> None:
    write(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in PACKAGED_TOKENIZER.iterdir()}
    assert written.keys() == {"vocab.json", "merges.txt", "tokenizer_config.json"}


@pytest.mark.parametrize("word", WORDS)
def test_every_word_is_one_token(tokenizer: CLIPTokenizer, word: str) -> None:
    assert tokenizer.tokenize(f"a {word} a")[1] == word + WORD_END


def test_every_caption_of_the_shapes_is_made_of_these_words(tokenizer: CLIPTokenizer) -> None:
    from cascade_train.data.shapes import Shapes

    shapes = Shapes(
        image_size=16, crop="center", shuffle_window_shards=1, num_workers=0, worker_start="fork", samples=300, seed=0
    )
    captions = [shapes.read(row).caption for row in range(300)]
    words = {token for caption in captions for token in tokenizer.tokenize(caption)}
    assert len(words) > 30
    assert words <= {word + WORD_END for word in WORDS}
    assert max(len(tokenizer(caption).input_ids) for caption in captions) <= 24
