package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Widths of lines for people, in characters.
const (
	defaultWidth = 80
	minWidth     = 40
	columnGap    = 2
)

// widthOf returns how long the lines on w may be: the width of its terminal, else COLUMNS if that is set,
// but minWidth at least; else 80.
func widthOf(w io.Writer) int {
	if w == stdout {
		if size, err := unix.IoctlGetWinsize(int(os.Stdout.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			return max(minWidth, int(size.Col))
		}
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		return max(minWidth, n)
	}
	return defaultWidth
}

// either returns one of two texts: yes if b is true, else no.
func either(b bool, yes, no string) string {
	if b {
		return yes
	}
	return no
}

// A grid is a table whose columns are ordered by importance. Where a line is too
// short for all of them, the last ones follow each row on lines of their own.
type grid struct {
	columns []string
	rows    [][]string
}

// newTable returns an empty table in the one style all commands use.
func newTable(columns ...string) *grid { return &grid{columns: columns} }

// add appends a row. A cell that is not given is empty.
func (g *grid) add(cells ...any) {
	row := make([]string, len(g.columns))
	for i, c := range cells {
		row[i] = fmt.Sprint(c)
	}
	g.rows = append(g.rows, row)
}

// render prints g on w.
func (g *grid) render(w io.Writer) {
	width := widthOf(w)
	widths, n := g.fit(width)
	printRow(w, g.columns[:n], widths)
	for _, row := range g.rows {
		printRow(w, row[:n], widths)
		var rest []string
		for i := n; i < len(row); i++ {
			if row[i] != "" {
				rest = append(rest, g.columns[i]+" "+row[i])
			}
		}
		if len(rest) > 0 {
			printItems(w, columnGap, rest, width)
		}
	}
}

// fit returns the widths of columns, and how many of them fit beside each other.
func (g *grid) fit(width int) (widths []int, n int) {
	widths = make([]int, len(g.columns))
	for i, c := range g.columns {
		widths[i] = utf8.RuneCountInString(c)
		for _, row := range g.rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	used := -columnGap
	for n < len(widths) && used+columnGap+widths[n] <= width {
		used += columnGap + widths[n]
		n++
	}
	return widths, max(1, n)
}

func printRow(w io.Writer, cells []string, widths []int) {
	var b strings.Builder
	for i, c := range cells {
		fmt.Fprintf(&b, "%-*s", widths[i]+columnGap, c)
	}
	fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
}

// printItems prints items with a gap between them on as many lines as they take,
// indented. An item is broken at blanks only if it is longer than a line.
func printItems(w io.Writer, indent int, items []string, width int) {
	room := width - indent
	line := ""
	flush := func() {
		if line != "" {
			fmt.Fprintln(w, strings.Repeat(" ", indent)+line)
		}
		line = ""
	}
	for _, item := range items {
		if line != "" && utf8.RuneCountInString(line)+columnGap+utf8.RuneCountInString(item) > room {
			flush()
		}
		if utf8.RuneCountInString(item) > room {
			printWrapped(w, strings.Repeat(" ", indent), indent+columnGap, item, width)
			continue
		}
		if line != "" {
			line += strings.Repeat(" ", columnGap)
		}
		line += item
	}
	flush()
}

// printWrapped prints text behind head, broken at blanks, its further lines
// indented. A word that is longer than a line has one of its own.
func printWrapped(w io.Writer, head string, indent int, text string, width int) {
	line, empty := head, true
	for _, word := range strings.Fields(text) {
		if !empty && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			fmt.Fprintln(w, line)
			line, empty = strings.Repeat(" ", indent), true
		}
		if !empty {
			line += " "
		}
		line += word
		empty = false
	}
	fmt.Fprintln(w, strings.TrimRight(line, " "))
}
