"""Write what of the documentation is made by code: `python -m tools.handbook`."""

from tools.handbook import pictures, reference

if __name__ == "__main__":
    for path, text in {**pictures.pictures(), **reference.pages()}.items():
        path.write_text(text)
