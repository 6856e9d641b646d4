package netns

import (
	"bytes"
	"os"
	"testing"
)

// Nothing in the program runs templates. The linker drops methods that nobody can call only where none is
// looked up by a name that comes at run time, and templates do that: with them the file is a fifth longer,
// and nearly all of it becomes resident.
func TestNoTemplates(t *testing.T) {
	file, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(file, []byte("main.newRoot")) {
		t.Fatal("the file has no names of functions")
	}
	if bytes.Contains(file, []byte("text/template.(*state).evalField")) {
		t.Error("the program runs templates: who calls them is in the output of go build -ldflags=-dumpdep")
	}
}
