// Package draw makes the pictures of docs/pictures: pure functions from data to the text
// of an SVG. The same data gives the same octets. A picture has its own light background,
// so that it reads in light and dark pages, names fonts by generic family only, loads
// nothing, and carries a title and a description for readers who do not see it.
//
// The width of a text is estimated from the number of its characters, because the
// reader's font is not known: the estimate is for the widest of the usual fonts.
package draw

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Colours. Readers who do not tell red from green can tell them apart. The colours of text
// have a contrast of at least 4.5 with the background.
const (
	paper = "#ffffff"
	ink   = "#1f2328"
	faint = "#59636e"
	rule  = "#d1d9e0"
	blue  = "#0b5cad"
	teal  = "#0f766e"
	amber = "#9a5b00"
)

const style = `
text{font-family:sans-serif;font-size:13px;fill:` + ink + `}
.title{font-size:16px;font-weight:bold}
.bold{font-weight:bold}
.small{font-size:11.5px}
.faint{fill:` + faint + `}
.light{fill:` + paper + `}
.mono{font-family:monospace}
.term{font-family:monospace;font-size:12px}
.tiny{font-family:monospace;font-size:11px}
.figure{font-size:30px;font-weight:bold}
.good{fill:` + teal + `}
.middle{text-anchor:middle}
.end{text-anchor:end}
`

// A Picture is an SVG in the making. Its methods draw from the back to the front, in
// units of a pixel from the upper left corner.
type Picture struct {
	width       float64
	title, desc string
	body        strings.Builder
}

// New begins a picture of the given width. [Picture.SVG] gives it its height.
func New(width float64, title, desc string) *Picture {
	return &Picture{width: width, title: title, desc: desc}
}

// number prints a length with at most one decimal.
func number(v float64) string {
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0")
}

// escape makes s the text of an element, without characters that XML forbids.
func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(strings.ToValidUTF8(s, "?"))) // a Builder has no errors
	return b.String()
}

// Rect draws a box with round corners.
func (p *Picture) Rect(x, y, w, h, round float64, fill, stroke string) {
	fmt.Fprintf(&p.body, "<rect x=%q y=%q width=%q height=%q rx=%q fill=%q stroke=%q/>\n",
		number(x), number(y), number(w), number(h), number(round), fill, stroke)
}

// Line draws a straight line.
func (p *Picture) Line(x1, y1, x2, y2, thick float64, stroke string) {
	fmt.Fprintf(&p.body, "<path d=\"M%s %sL%s %s\" fill=\"none\" stroke=%q stroke-width=%q/>\n", number(x1), number(y1),
		number(x2), number(y2), stroke, number(thick))
}

// Curve draws a line through points, x and y in turn.
func (p *Picture) Curve(points []float64, thick float64, stroke string) {
	var pairs []string
	for i := 0; i+1 < len(points); i += 2 {
		pairs = append(pairs, number(points[i])+","+number(points[i+1]))
	}
	fmt.Fprintf(&p.body, "<polyline points=%q fill=\"none\" stroke=%q stroke-width=%q stroke-linejoin=\"round\"/>\n",
		strings.Join(pairs, " "), stroke, number(thick))
}

// Dot draws a small disc.
func (p *Picture) Dot(x, y, r float64, fill string) {
	fmt.Fprintf(&p.body, "<circle cx=%q cy=%q r=%q fill=%q/>\n", number(x), number(y), number(r), fill)
}

// Arrow draws a line with a head at its end, along one axis.
func (p *Picture) Arrow(x1, y1, x2, y2 float64, stroke string) {
	p.Line(x1, y1, x2, y2, 1.5, stroke)
	const l, h = 8, 4
	dx, dy := float64(cmp.Compare(x2, x1)), float64(cmp.Compare(y2, y1))
	fmt.Fprintf(&p.body, "<path d=\"M%s %sL%s %sL%s %sZ\" fill=%q/>\n", number(x2), number(y2),
		number(x2-l*dx+h*dy), number(y2-l*dy+h*dx), number(x2-l*dx-h*dy), number(y2-l*dy-h*dx), stroke)
}

// Text writes a line of text whose base line is at y, with the given classes of style.
func (p *Picture) Text(x, y float64, class, s string) {
	p.body.WriteString("<text x=\"" + number(x) + "\" y=\"" + number(y) + "\"")
	if class != "" {
		fmt.Fprintf(&p.body, " class=%q", class)
	}
	if strings.Contains(s, "  ") || strings.HasPrefix(s, " ") {
		p.body.WriteString(` xml:space="preserve"`)
	}
	p.body.WriteString(">" + escape(s) + "</text>\n")
}

// SVG returns the text of the picture with the given height.
func (p *Picture) SVG(height float64) string {
	var b strings.Builder
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=%q height=%q viewBox=\"0 0 %s %s\" role=\"img\""+
		" aria-labelledby=\"t d\">\n", number(p.width), number(height), number(p.width), number(height))
	fmt.Fprintf(&b, "<title id=\"t\">%s</title>\n<desc id=\"d\">%s</desc>\n<style>%s</style>\n", escape(p.title),
		escape(p.desc), style)
	fmt.Fprintf(&b, "<rect x=\"0.5\" y=\"0.5\" width=%q height=%q rx=\"6\" fill=%q stroke=%q/>\n", number(p.width-1),
		number(height-1), paper, rule)
	b.WriteString(p.body.String())
	b.WriteString("</svg>\n")
	return b.String()
}

// TextWidth returns how wide a line of text gets at most. A character of a font of fixed
// width takes 0.602 of the size, and of the widest other usual font 0.58 on average.
func TextWidth(s string, size float64) float64 {
	return 0.602 * size * float64(utf8.RuneCountInString(s))
}

// Wrap breaks s at blanks into lines that are at most width wide. A word that is wider
// has a line of its own.
func Wrap(s string, size, width float64) (lines []string) {
	line := ""
	for _, word := range strings.Fields(s) {
		switch {
		case line == "":
			line = word
		case TextWidth(line+" "+word, size) <= width:
			line += " " + word
		default:
			lines, line = append(lines, line), word
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}
