// Command pictures writes docs/pictures from what is in the repository: charts from
// docs/bench/latest.json and what make stress writes, sequence diagrams from the traces of
// docs/connections.md and docs/service.md, the packages from their imports and the table of
// layers in test/arch, the demo from docs/pictures/demo.txt, the dashboard from
// docs/pictures/dashboard.json.
//
//	go run ./internal/pictures              # write them
//	go run ./internal/pictures -demo FILE   # first replace demo.txt by FILE, the output of the demo
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"ipoibcm/internal/pictures/draw"
)

const module = "ipoibcm/"

// folder is where the pictures are.
const folder = "docs/pictures"

func main() {
	demo := flag.String("demo", "", "take the output of the demo from this file")
	flag.Parse()
	if err := write(".", *demo); err != nil {
		fmt.Fprintln(os.Stderr, "pictures:", err)
		os.Exit(1)
	}
}

// write writes all pictures of the repository at root.
func write(root, demo string) error {
	if demo != "" {
		b, err := os.ReadFile(demo)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(root, folder, "demo.txt"), b, 0o644); err != nil {
			return err
		}
	}
	all, err := pictures(root)
	if err != nil {
		return err
	}
	for name, svg := range all {
		if err := os.WriteFile(filepath.Join(root, folder, name), []byte(svg), 0o644); err != nil {
			return err
		}
	}
	for _, part := range parts {
		_, now, err := part.renew(root, all)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(root, part.file), []byte(now), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// A part is what this command writes into a document, between the comments begin and end.
type part struct {
	file, begin, end string
	body             func(root string, svgs map[string]string) (string, error)
}

var parts = []part{
	{"README.md", "<!-- figures of docs/bench/latest.json, by make pictures -->", "<!-- end of the figures -->", figures},
	{"docs/performance.md", "<!-- pictures of docs/bench, by make pictures -->", "<!-- end of the pictures -->",
		stressLinks},
}

// renew returns a document as it was, and as it is with its part p written anew. It writes no file.
func (p part) renew(root string, svgs map[string]string) (was, now string, err error) {
	b, err := os.ReadFile(filepath.Join(root, p.file))
	if err != nil {
		return "", "", err
	}
	body, err := p.body(root, svgs)
	if err != nil {
		return "", "", err
	}
	was = string(b)
	before, rest, begins := strings.Cut(was, p.begin)
	_, after, ends := strings.Cut(rest, p.end)
	if !begins || !ends {
		return "", "", fmt.Errorf("%s has no place for what is written into it", p.file)
	}
	if body = strings.TrimSpace(body); body != "" {
		body += "\n\n"
	}
	return was, before + p.begin + "\n\n" + body + p.end + after, nil
}

// figures returns the table for README.
func figures(root string, _ map[string]string) (string, error) {
	report, err := readReport(root, latest)
	if err != nil {
		return "", err
	}
	return draw.FiguresTable(report), nil
}

// stressLinks returns links to the charts of make stress that were drawn.
func stressLinks(_ string, svgs map[string]string) (string, error) {
	links := ""
	for _, name := range slices.Sorted(maps.Keys(draw.StressCharts)) {
		if svgs[name+".svg"] != "" {
			links += fmt.Sprintf("\n![%s](pictures/%s.svg)\n", draw.StressCharts[name].Title, name)
		}
	}
	return links, nil
}

// pictures returns all pictures of the repository at root, by file name.
func pictures(root string) (map[string]string, error) {
	all := map[string]string{"data-path.svg": draw.DataPathSVG()}
	for _, part := range []func(root string) (map[string]string, error){bench, sequences, packages, demo, dashboard} {
		some, err := part(root)
		if err != nil {
			return nil, err
		}
		maps.Copy(all, some)
	}
	return all, nil
}

// latest is the report of make bench.
const latest = "docs/bench/latest.json"

func readReport(root, file string) (draw.Report, error) {
	b, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return draw.Report{}, err
	}
	r, err := draw.ReadReport(b)
	if err != nil {
		err = fmt.Errorf("%s: %w", file, err)
	}
	return r, err
}

// bench draws the charts of make bench and of make stress.
func bench(root string) (map[string]string, error) {
	report, err := readReport(root, latest)
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for name, chart := range draw.BenchCharts {
		if all[name+".svg"], err = draw.BenchSVG(report, chart); err != nil {
			return nil, fmt.Errorf("%s: %w", latest, err)
		}
	}
	return all, stress(root, all)
}

// stress adds the charts of make stress to all, if its report exists.
func stress(root string, all map[string]string) error {
	report, err := readReport(root, "docs/bench/stress.json")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for name, chart := range draw.StressCharts {
		if svg := draw.StressSVG(report, chart); svg != "" {
			all[name+".svg"] = svg
		}
	}
	return nil
}

// scene matches a heading of a page, with the name of a scene below it and the trace of the scene.
var scene = regexp.MustCompile("(?s)\n## ([^\n]+)\n(?:[^#]|#[^#])*?<!-- scene: ([^\n]+) -->\n+```mermaid\n(.*?)```")

// traced holds the pages with traces, which tests write, and the prefix that the names of a page's pictures
// have.
var traced = map[string]string{"docs/connections.md": "connection-", "docs/service.md": "service-"}

// sequences draws the traces.
func sequences(root string) (map[string]string, error) {
	all := map[string]string{}
	for file, prefix := range traced {
		b, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return nil, err
		}
		found := scene.FindAllStringSubmatch(string(b), -1)
		for _, m := range found {
			s, err := draw.ReadMermaid(m[3])
			if err != nil {
				return nil, fmt.Errorf("%s, scene %s: %w", file, m[2], err)
			}
			desc := fmt.Sprintf("Sequence diagram of a trace between %s and %s; its text is in %s.", s.Ends[0], s.Ends[1], file)
			all[prefix+strings.ReplaceAll(m[2], " ", "-")+".svg"] = draw.SequenceSVG(m[1], desc, s)
		}
		if n := strings.Count(string(b), "<!-- scene:"); len(found) != n {
			return nil, fmt.Errorf("%s: %d of %d scenes are understood", file, len(found), n)
		}
	}
	return all, nil
}

// demo draws the output of the demo.
func demo(root string) (map[string]string, error) {
	b, err := os.ReadFile(filepath.Join(root, folder, "demo.txt"))
	if err != nil {
		return nil, err
	}
	lines := append([]string{"$ ipoibcmd demo"}, strings.Split(strings.TrimSpace(string(b)), "\n")...)
	desc := "The output of ipoibcmd demo, which is in docs/pictures/demo.txt: " + lines[len(lines)-1]
	return map[string]string{"demo.svg": draw.TerminalSVG("ipoibcmd demo", desc, lines, 132)}, nil
}

// dashboard draws the dashboard from the answers of a Prometheus.
func dashboard(root string) (map[string]string, error) {
	b, err := os.ReadFile(filepath.Join(root, folder, "dashboard.json"))
	if err != nil {
		return nil, err
	}
	d, err := draw.ReadDashboard(b)
	if err != nil {
		return nil, fmt.Errorf("dashboard.json: %w", err)
	}
	return map[string]string{"dashboard.svg": draw.DashboardSVG(d)}, nil
}

// packages draws the layers and the imports.
func packages(root string) (map[string]string, error) {
	all, err := readPackages(root)
	if err != nil {
		return nil, err
	}
	return map[string]string{"layers.svg": draw.LayersSVG(all), "imports.svg": draw.ImportsSVG(all)}, nil
}

// readPackages returns the entries of the table of layers, with what they import of each
// other. A package below an entry's directory counts as a part of the entry.
func readPackages(root string) (all []draw.Package, err error) {
	table, testOnly, err := readLayers(filepath.Join(root, "test/arch/arch_test.go"))
	if err != nil {
		return nil, err
	}
	imports := map[string]map[string]bool{}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			if rel != "." && strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" {
				return filepath.SkipDir
			}
			return nil
		}
		dir := filepath.ToSlash(filepath.Dir(rel))
		from := entry(table, dir)
		if from == "" || !strings.HasSuffix(rel, ".go") || strings.HasSuffix(rel, "_test.go") ||
			len(entry(testOnly, dir)) > len(from) {
			return nil
		}
		return readImports(path, from, table, imports)
	})
	for dir, to := range imports {
		p := table[dir]
		p.Imports = slices.Sorted(maps.Keys(to))
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b draw.Package) int { return cmp.Compare(a.Dir, b.Dir) })
	return all, err
}

// readImports adds the packages that a file imports to imports[from].
func readImports(path, from string, table map[string]draw.Package, imports map[string]map[string]bool) error {
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
	if err != nil {
		return err
	}
	if imports[from] == nil {
		imports[from] = map[string]bool{}
	}
	for _, spec := range f.Imports {
		name, _ := strconv.Unquote(spec.Path.Value)
		dep, ours := strings.CutPrefix(name, module)
		if to := entry(table, dep); ours && to != "" && to != from {
			imports[from][to] = true
		}
	}
	return nil
}

// entry returns the longest entry of a table that is dir or a parent of dir, "" if there is none.
func entry(table map[string]draw.Package, dir string) (best string) {
	for e := range table {
		if (dir == e || strings.HasPrefix(dir, e+"/")) && len(e) > len(best) {
			best = e
		}
	}
	return best
}

// readLayers reads the tables of test/arch: layers, and packages for tests.
func readLayers(file string) (table, testOnly map[string]draw.Package, err error) {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, nil, err
	}
	table, testOnly = map[string]draw.Package{}, map[string]draw.Package{}
	ast.Inspect(f, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok || len(v.Values) != 1 {
			return true
		}
		list, ok := v.Values[0].(*ast.CompositeLit)
		if !ok {
			return true
		}
		for _, e := range list.Elts {
			switch v.Names[0].Name {
			case "layers":
				if p, ok := layerRow(e); ok {
					table[p.Dir] = p
				}
			case "testOnly":
				if dir, ok := text(e); ok {
					testOnly[dir] = draw.Package{Dir: dir}
				}
			}
		}
		return false
	})
	if len(table) < 20 || len(testOnly) < 2 {
		return nil, nil, fmt.Errorf("%s: %d layered packages and %d for tests are understood", file, len(table),
			len(testOnly))
	}
	return table, testOnly, nil
}

// layerRow reads one row of the table of layers: directory, layer, kind.
func layerRow(e ast.Expr) (p draw.Package, ok bool) {
	row, ok := e.(*ast.CompositeLit)
	if !ok || len(row.Elts) != 3 {
		return p, false
	}
	p.Dir, ok = text(row.Elts[0])
	layer, isNumber := row.Elts[1].(*ast.BasicLit)
	kind, isName := row.Elts[2].(*ast.Ident)
	if !ok || !isNumber || !isName {
		return p, false
	}
	p.Layer, _ = strconv.Atoi(layer.Value)
	p.Kind = kind.Name
	return p, true
}

func text(e ast.Expr) (string, bool) {
	l, ok := e.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(l.Value)
	return s, err == nil
}
