from pathlib import Path

import pytest
from transformers import CLIPTokenizer

from cascade_train.models.text_encoder import PACKAGED_TOKENIZER
from scripts.write_tiny_tokenizer import END, START, WORD_END, WORDS, vocabulary, write


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


@pytest.mark.parametrize("text", ["zebra-striped, 42!", "Größe 漢字 🦓", "don't"])
def test_any_text_can_be_written(tokenizer: CLIPTokenizer, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids[1:-1]).replace(" ", "") == text.lower().replace(" ", "")


def test_start_and_end_are_the_last_ids(tokenizer: CLIPTokenizer) -> None:
    assert len(tokenizer) == len(vocabulary()) == 671
    assert (vocabulary()[START], vocabulary()[END]) == (669, 670)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (669, 670, 670)


def test_tokens_can_be_added(tokenizer: CLIPTokenizer) -> None:
    fresh = CLIPTokenizer.from_pretrained(PACKAGED_TOKENIZER)
    assert fresh.add_tokens("[star]") == 1
    assert fresh("a [star]").input_ids[2] == 671
