package arch

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

// TestCountersHaveNames: a counter without a name is shown nowhere, and nobody notices.
func TestCountersHaveNames(t *testing.T) {
	all, structs := read(t), 0
	for name, f := range all.sources {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		n, missing := nameless(f)
		structs += n
		for _, field := range missing {
			t.Errorf("%s: %s is beside counters and has no tag with its name (package counters)", name, field)
		}
	}
	if structs < 15 {
		t.Errorf("%d structs of counters were found, want more", structs)
	}
}

// nameless returns how many structs of f have counters, and which fields of these structs have the type of
// a counter and no name.
func nameless(f *ast.File) (structs int, missing []string) {
	ast.Inspect(f, func(n ast.Node) bool {
		s, ok := n.(*ast.StructType)
		if !ok {
			return true
		}
		var types []string // of counters
		for _, field := range s.Fields.List {
			if named(field) {
				types = append(types, typeName(field.Type))
			}
		}
		if len(types) == 0 {
			return true
		}
		structs++
		for _, field := range s.Fields.List {
			if !named(field) && slices.Contains(types, typeName(field.Type)) {
				for _, id := range field.Names {
					missing = append(missing, id.Name)
				}
			}
		}
		return true
	})
	return structs, missing
}

func named(f *ast.Field) bool { return f.Tag != nil && strings.Contains(f.Tag.Value, `name:"`) }

func typeName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// TestNamelessIsSeen keeps the rule from finding nothing.
func TestNamelessIsSeen(t *testing.T) {
	const src = "package p\n" +
		"type a struct{\n\tIn uint64 `name:\"in\"`\n\tOut, back uint64\n\tlast time.Time\n}\n" +
		"type b struct{ n uint64 }\n"
	structs, missing := nameless(parse(t, src))
	if got := strings.Join(missing, " "); structs != 1 || got != "Out back" {
		t.Errorf("%d structs, without a name %q; want 1, \"Out back\"", structs, got)
	}
}
