package draw

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// A Package is one package of a program, and its place in the layers.
type Package struct {
	Dir     string // its directory
	Layer   int    // packages import from layers below theirs only
	Kind    string // "pure", "edge" or "shell"
	Imports []string
}

// byLayer sorts packages from the highest layer down, and by name.
func byLayer(all []Package) []Package {
	sorted := slices.Clone(all)
	slices.SortFunc(sorted, func(a, b Package) int {
		return cmp.Or(b.Layer-a.Layer, strings.Compare(a.Dir, b.Dir))
	})
	return sorted
}

func kindColours(kind string) (fill, stroke string) {
	switch kind {
	case "pure":
		return "#e6f4f1", teal
	case "edge":
		return "#eef4fb", blue
	}
	return "#f3f4f6", faint
}

// LayersSVG draws the packages as boxes, the highest layer first. The number in a box
// is how many of the packages import that package.
func LayersSVG(all []Package) string {
	const (
		width, left, size, h, gap = 960, 70, 12, 26, 8
	)
	users := map[string]int{}
	for _, p := range all {
		for _, to := range p.Imports {
			users[to]++
		}
	}
	p := New(width, "Packages and layers", fmt.Sprintf("%d packages in layers. Imports only point down.", len(all)))
	p.Text(20, 30, "title", "Packages and layers")
	y, x := 50.0, float64(left)
	layer := -1
	for _, pkg := range byLayer(all) {
		text := pkg.Dir
		if n := users[pkg.Dir]; n > 0 {
			text += fmt.Sprintf("  %d", n)
		}
		w := TextWidth(text, size) + 18
		switch {
		case pkg.Layer != layer:
			if layer >= 0 {
				y += h + gap + 8
				p.Line(20, y-6, width-20, y-6, 1, rule)
			}
			layer, x = pkg.Layer, left
			y += 2
			p.Text(28, y+18, "bold faint", fmt.Sprint(layer))
		case x+w > width-20:
			x, y = left, y+h+gap
		}
		fill, stroke := kindColours(pkg.Kind)
		p.Rect(x, y, w, h, 5, fill, stroke)
		p.Text(x+9, y+17.5, "term", text)
		x += w + gap
	}
	y += h + 30
	x = 20
	for _, k := range [][2]string{{"pure", "pure: no goroutine, clock or socket"},
		{"edge", "edge: touches the system, decides nothing"}, {"shell", "shell"}} {
		fill, stroke := kindColours(k[0])
		p.Rect(x, y-12, 16, 14, 3, fill, stroke)
		p.Text(x+22, y, "small", k[1])
		x += TextWidth(k[1], 11.5) + 40
	}
	p.Text(20, y+22, "small faint", "Left: the layer. Imports point down; packages of a layer do not know each other. "+
		"In a box: how many packages here import it.")
	return p.SVG(y + 40)
}

// ImportsSVG draws the imports as a matrix: the row of a package has a dot in the column of
// each package that it imports. Imports that point down are left of the diagonal.
func ImportsSVG(all []Package) string {
	const (
		cell, left, top = 15, 200, 200
	)
	sorted := byLayer(all)
	n := len(sorted)
	column := map[string]int{}
	for i, pkg := range sorted {
		column[pkg.Dir] = n - 1 - i // the lowest layer is the first column
	}
	edges := 0
	for _, pkg := range sorted {
		edges += len(pkg.Imports)
	}
	width := float64(left + n*cell + 30)
	p := New(width, "Who imports whom",
		fmt.Sprintf("A matrix of %d packages and %d imports. All imports point to lower layers.", n, edges))
	p.Text(20, 30, "title", "Who imports whom")
	p.Text(20, 50, "small faint", "a row imports")
	p.Text(20, 65, "small faint", "what its dots stand under")
	for i, pkg := range sorted { // below everything else
		y := float64(top + i*cell)
		if i%2 == 0 {
			p.Rect(20, y, width-40, cell, 0, "#f6f8fa", "none")
		}
		if i > 0 && pkg.Layer != sorted[i-1].Layer {
			p.Line(20, y, width-20, y, 1, "#9aa7b4")
		}
	}
	for i, pkg := range sorted {
		y := float64(top + i*cell)
		_, stroke := kindColours(pkg.Kind)
		p.Text(left-8, y+11.5, "tiny end", pkg.Dir)
		x := float64(left+column[pkg.Dir]*cell) + cell/2
		p.Rect(x-4, y+3.5, 8, 8, 2, rule, "none")
		fmt.Fprintf(&p.body, "<text class=\"tiny\" transform=\"translate(%s %d) rotate(-90)\">%s</text>\n", number(x+3.5),
			top-8, escape(pkg.Dir))
		for _, to := range pkg.Imports {
			if c, ok := column[to]; ok {
				p.Dot(float64(left+c*cell)+cell/2, y+cell/2, 4, stroke)
			}
		}
		if i > 0 && pkg.Layer != sorted[i-1].Layer {
			edge := float64(left + (n-i)*cell)
			p.Line(edge, top, edge, float64(top+n*cell), 1, "#9aa7b4")
		}
	}
	return p.SVG(float64(top+n*cell) + 20)
}
