package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// load reads the file at path over c. It returns the line of every key at the top of the file, as linesOf
// does. Unknown keys are errors with line numbers.
func (c *Config) load(path string) (lines map[string]int, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	if err := c.decode(b); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return linesOf(b), nil
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

// linesOf returns the line of the value of every key at the top of b, and of every item of a list there,
// such as peers[0]. b must have been decoded before.
func linesOf(b []byte) map[string]int {
	lines := map[string]int{}
	eachKey(b, func(key string, value *yaml.Node) {
		lines[key] = value.Line
		for i, item := range value.Content {
			lines[fmt.Sprintf("%s[%d]", key, i)] = item.Line
		}
	})
	return lines
}

// eachKey visits the keys at the top of the first document in b.
func eachKey(b []byte, visit func(key string, value *yaml.Node)) {
	var doc yaml.Node
	if yaml.Unmarshal(b, &doc) != nil || len(doc.Content) == 0 || doc.Content[0].Kind != yaml.MappingNode {
		return
	}
	pairs := doc.Content[0].Content
	for i := 0; i+1 < len(pairs); i += 2 {
		visit(pairs[i].Value, pairs[i+1])
	}
}

// Patterns of the YAML library's type errors, which name types of Go.
var (
	yamlUnknown = regexp.MustCompile(`line (\d+): field ((?s).*) not found in type \S+`)
	// a tag may have any characters
	yamlType = regexp.MustCompile("line (\\d+): cannot unmarshal !+((?s).*?)(?: `((?s).*)`)? into (\\S+)$")
)

// typeError turns the text of a type error into one in terms of the file.
func typeError(e string) string {
	e = yamlUnknown.ReplaceAllString(e, `line $1: unknown key "$2" (ipoibcmd init prints all keys)`)
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

func (c *Config) decode(b []byte) error {
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	err := d.Decode(c)
	if errors.Is(err, io.EOF) {
		return nil // empty, or comments only
	}
	var te *yaml.TypeError
	if errors.As(err, &te) {
		for i, e := range te.Errors {
			te.Errors[i] = typeError(e)
		}
		return errors.New(strings.Join(te.Errors, "; "))
	}
	if err != nil {
		return err
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return errors.New("more than one YAML document; the second would be ignored")
	}
	eachKey(b, func(key string, value *yaml.Node) {
		// The library would cut the fraction off.
		if err == nil && value.ShortTag() == "!!float" &&
			slices.Contains([]string{"ud_mtu", "receive_mtu", "pkey", "threads"}, key) {
			err = fmt.Errorf("line %d: %q where a whole number belongs", value.Line, value.Value)
		}
	})
	return err
}
