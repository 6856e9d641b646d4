package main

import (
	"encoding/xml"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"ipoibcm/internal/pictures/draw"
)

const root = "../.."

// drawn makes all pictures once.
var drawn = sync.OnceValues(func() (map[string]string, error) { return pictures(root) })

func all(t *testing.T) map[string]string {
	t.Helper()
	svgs, err := drawn()
	if err != nil {
		t.Fatal(err)
	}
	return svgs
}

// TestPicturesAreCurrent: docs/pictures has what is drawn from the repository as it is, and
// no other picture.
func TestPicturesAreCurrent(t *testing.T) {
	want := all(t)
	for name, svg := range want {
		b, err := os.ReadFile(filepath.Join(root, folder, name))
		if err != nil {
			t.Errorf("%v: make pictures", err)
		} else if string(b) != svg {
			t.Errorf("%s/%s is not what its data say: make pictures", folder, name)
		}
	}
	there, err := filepath.Glob(filepath.Join(root, folder, "*.svg"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range there {
		if name := filepath.Base(path); want[name] == "" {
			t.Errorf("%s/%s is drawn by nothing", folder, name)
		}
	}
}

// TestPartsOfDocuments: what is written into documents is that of the last measurements.
func TestPartsOfDocuments(t *testing.T) {
	for _, p := range parts {
		was, now, err := p.renew(root, all(t))
		if err != nil {
			t.Error(err)
		} else if was != now {
			t.Errorf("%s is not what docs/bench says: make pictures", p.file)
		}
	}
}

// TestRenewStays: a part that is written twice is the same, empty or not.
func TestRenewStays(t *testing.T) {
	for _, body := range []string{"", "\n![a](b.svg)\n"} {
		dir := t.TempDir()
		p := part{"x.md", "<!-- a -->", "<!-- b -->", func(string, map[string]string) (string, error) { return body, nil }}
		text := "before\n\n<!-- a -->\n\n![old](old.svg)\n\n<!-- b -->\n\nafter\n"
		for range 3 {
			if err := os.WriteFile(filepath.Join(dir, p.file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, now, err := p.renew(dir, nil)
			if err != nil {
				t.Fatal(err)
			}
			text = now
		}
		if want := "before\n\n<!-- a -->\n" + body + "\n<!-- b -->\n\nafter\n"; text != want {
			t.Errorf("with %q: %q, want %q", body, text, want)
		}
	}
}

// TestSameDataSamePicture draws all of them again.
func TestSameDataSamePicture(t *testing.T) {
	again, err := pictures(root)
	if err != nil {
		t.Fatal(err)
	}
	for name, svg := range all(t) {
		if again[name] != svg {
			t.Errorf("%s is another at the second time", name)
		}
	}
}

// TestPicturesStandAlone: each is well-formed, has a title and a description, loads
// nothing, and asks for no font by its name.
func TestPicturesStandAlone(t *testing.T) {
	for name, svg := range all(t) {
		texts, err := elements(svg)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, e := range []string{"title", "desc"} {
			if texts[e] == "" {
				t.Errorf("%s has no %s", name, e)
			}
		}
		for _, bad := range []string{"href", "url(", "@import", "<image", "<script", "NaN", "Inf\""} {
			if strings.Contains(svg, bad) {
				t.Errorf("%s has %q", name, bad)
			}
		}
		for _, part := range strings.Split(svg, "font-family:")[1:] {
			if !strings.HasPrefix(part, "sans-serif") && !strings.HasPrefix(part, "monospace") {
				t.Errorf("%s asks for the font %.20q", name, part)
			}
		}
	}
}

// elements reads XML and returns the text of each kind of element.
func elements(svg string) (map[string]string, error) {
	texts, in := map[string]string{}, []string{""}
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return texts, nil
		}
		if err != nil {
			return texts, err
		}
		switch tok := tok.(type) {
		case xml.StartElement:
			in = append(in, tok.Name.Local)
		case xml.EndElement:
			in = in[:len(in)-1]
		case xml.CharData:
			texts[in[len(in)-1]] += string(tok)
		}
	}
}

// TestPicturesAreShown: a document links each.
func TestPicturesAreShown(t *testing.T) {
	var text strings.Builder
	docs, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range append(docs, filepath.Join(root, "README.md")) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(b)
	}
	for name := range all(t) {
		if !strings.Contains(text.String(), "pictures/"+name+")") {
			t.Errorf("no document shows %s", name)
		}
	}
}

// TestNamesOfTheDataPath: what the picture of the data path names is there.
func TestNamesOfTheDataPath(t *testing.T) {
	named := 0
	for _, b := range draw.DataPath {
		if b.Name == "" {
			continue
		}
		named++
		dir, typ, _ := strings.Cut(b.Name, ".")
		types, err := typesOf(filepath.Join(root, dir))
		if err != nil {
			t.Error(err)
		} else if !slices.Contains(types, typ) {
			t.Errorf("package %s has no type %s", dir, typ)
		}
	}
	if named < 8 {
		t.Errorf("%d boxes have names of ours, want 8 at least", named)
	}
}

// typesOf returns the names that a directory's Go files declare at the top.
func typesOf(dir string) (names []string, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		return nil, errors.Join(err, errors.New(dir+" has no Go files"))
	}
	for _, path := range files {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return nil, err
		}
		names = append(names, slices.Collect(maps.Keys(f.Scope.Objects))...)
	}
	return names, nil
}

// TestPackagesAreRead: the table of layers and the imports are found.
func TestPackagesAreRead(t *testing.T) {
	read, err := readPackages(root)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(read, func(p draw.Package) bool { return p.Dir == "ipoib" })
	if i < 0 {
		t.Fatal("package ipoib is missing")
	}
	if got := read[i]; got.Kind != "pure" || got.Layer < 4 {
		t.Errorf("ipoib is %s on layer %d, want pure, 4 or higher", got.Kind, got.Layer)
	}
	for _, want := range []string{"cm", "neigh", "wire/encap"} {
		if !slices.Contains(read[i].Imports, want) {
			t.Errorf("ipoib imports %q, want %s among them", read[i].Imports, want)
		}
	}
}
