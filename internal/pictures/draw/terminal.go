package draw

import (
	"strings"
	"unicode/utf8"
)

// TerminalSVG draws lines as a terminal shows them. A line longer than columns goes on in
// the next row, indented by four columns, so that nothing is lost. A line that begins with
// "$ " is a command, and drawn bold. An "ok" at the beginning of a line has a colour.
func TerminalSVG(title, desc string, lines []string, columns int) string {
	const size, lead, margin = 12, 17, 20
	width := 2*margin + TextWidth(strings.Repeat("m", columns), size)
	p := New(width, title, desc)
	p.Rect(8, 8, width-16, 30, 6, "#e6eaef", "none")
	for i, c := range []string{"#d1242f", "#bf8700", "#1a7f37"} {
		p.Dot(float64(26+18*i), 23, 5, c)
	}
	p.Text(width/2, 28, "small faint middle", title)
	y := 60.0
	for _, line := range lines {
		for i, part := range fold(line, columns) {
			class := "term"
			switch {
			case strings.HasPrefix(line, "$ "):
				class += " bold"
			case strings.HasPrefix(line, "ok ") && i == 0:
				p.Text(margin, y, "term bold good", "ok")
				part = "  " + strings.TrimPrefix(part, "ok")
			}
			p.Text(margin, y, class, strings.ReplaceAll(part, "\t", " "))
			y += lead
		}
	}
	return p.SVG(y + 6)
}

// fold breaks a line into parts of at most columns characters, at a blank if one is near the end of a part.
func fold(line string, columns int) (parts []string) {
	for utf8.RuneCountInString(line) > columns {
		runes := []rune(line)
		cut := columns
		for i := columns; i > columns*2/3; i-- {
			if runes[i] == ' ' {
				cut = i
				break
			}
		}
		parts = append(parts, string(runes[:cut]))
		line = "    " + strings.TrimLeft(string(runes[cut:]), " ")
	}
	return append(parts, line)
}
