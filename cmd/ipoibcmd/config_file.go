package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// load reads the file at path over c. It returns the lines of its values, as a finder finds them. Unknown
// keys are errors with line numbers.
func (c *Config) load(path string) (lines map[string]int, err error) {
	top, err := topOf(path)
	if err != nil {
		return nil, err
	}
	lines = map[string]int{}
	if err := c.decode(top, lines); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return lines, nil
}

// topOf returns the keys and values of the file at path, as parse does.
func topOf(path string) (*yaml.Node, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	top, err := parse(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return top, nil
}

// parse returns the keys and values in b; a zero node if there are none.
func parse(b []byte) (*yaml.Node, error) {
	d := yaml.NewDecoder(bytes.NewReader(b))
	var doc yaml.Node
	if err := d.Decode(&doc); errors.Is(err, io.EOF) {
		return new(yaml.Node), nil // empty, or comments only
	} else if err != nil {
		return nil, err
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one YAML document; the second would be ignored")
	}
	return doc.Content[0], nil
}

// target returns the node that n stands for: another one if n is an alias.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// decode sets c from n, the keys and values of a file, and adds the lines of the values to lines.
func (c *Config) decode(n *yaml.Node, lines map[string]int) error {
	err := n.Decode(c)
	if te := (*yaml.TypeError)(nil); errors.As(err, &te) {
		for i, e := range te.Errors {
			te.Errors[i] = typeError(e)
		}
		return errors.New(strings.Join(te.Errors, "; "))
	}
	if err != nil {
		return err
	}
	f := finder{lines: lines, seen: map[string]bool{}}
	f.find("", n, reflect.TypeFor[Config]())
	return errorIf(len(f.wrong) > 0, errors.New(strings.Join(f.wrong, "; ")))
}

// yamlType matches the YAML library's type errors, which name types of Go. A tag may have any characters.
var yamlType = regexp.MustCompile("line (\\d+): cannot unmarshal !+((?s).*?)(?: `((?s).*)`)? into (\\S+)$")

// typeError turns the text of a type error into one in terms of the file.
func typeError(e string) string {
	m := yamlType.FindStringSubmatch(e)
	if m == nil {
		return e
	}
	is := cmp.Or(map[string]string{"seq": "a list", "map": "keys and values"}[m[2]], fmt.Sprintf("%q", m[3]))
	number := either(m[2] == "int", "a number in range", "a number") // it is one, but too large or negative
	want := cmp.Or(map[string]string{"string": "a word", "bool": "true or false", "[]string": "a list",
		"int": number, "uint16": number}[m[4]], "keys and values, such as name: ibcm0")
	return fmt.Sprintf("line %s: %s where %s belongs (ipoibcmd init shows an example)", m[1], is, want)
}

// A finder finds where a file has its settings, and what the YAML library lets pass: unknown keys, and
// fractions, which it cuts off.
type finder struct {
	// lines are those of the values by their keys, such as limits.connections, and of the items of lists,
	// such as peers[0].
	lines map[string]int
	seen  map[string]bool // keys
	wrong []string
}

// find visits the keys of n, which has been decoded into a struct of type t. Like the library it visits what
// is merged into n last, and there no key that was seen before, so it comes to an end where the library did.
func (f *finder) find(prefix string, n *yaml.Node, t reflect.Type) {
	var merged []*yaml.Node
	for p := range slices.Chunk(target(n).Content, 2) {
		name, line, value := target(p[0]).Value, p[1].Line, target(p[1])
		key := prefix + name
		field, ok := fieldOf(t, name)
		switch {
		case isMerge(p[0]) && value.Kind == yaml.SequenceNode:
			merged = append(merged, value.Content...)
			continue
		case isMerge(p[0]):
			merged = append(merged, value)
			continue
		case f.seen[key]:
			continue
		case !ok:
			f.wrong = append(f.wrong, fmt.Sprintf("line %d: unknown key %q (ipoibcmd init prints all keys)", p[0].Line, name))
		case field.Kind() == reflect.Struct:
			f.find(key+".", value, field)
		case isWhole(field) && value.ShortTag() == "!!float":
			f.wrong = append(f.wrong, fmt.Sprintf("line %d: %q where a whole number belongs", line, value.Value))
		}
		f.seen[key], f.lines[key] = true, line
		for i, item := range value.Content {
			f.lines[fmt.Sprintf("%s[%d]", key, i)] = item.Line
		}
	}
	for _, m := range merged {
		f.find(prefix, m, t)
	}
}

// isMerge reports whether key is "<<", whose value is merged into its mapping.
func isMerge(key *yaml.Node) bool { return key.Value == "<<" && key.ShortTag() == "!!merge" }

// isWhole reports whether a setting of type t is a whole number.
func isWhole(t reflect.Type) bool {
	return slices.Contains([]reflect.Kind{reflect.Int, reflect.Uint16, reflect.Uint32}, t.Kind())
}

// fieldOf returns the type of the field of t that has the given key in the file.
func fieldOf(t reflect.Type, key string) (reflect.Type, bool) {
	for i := range t.NumField() {
		if f := t.Field(i); f.Tag.Get("yaml") == key {
			return f.Type, true
		}
	}
	return nil, false
}
