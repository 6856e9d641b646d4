package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
)

// licenceFile matches the names of files that licences ask to be passed on.
var licenceFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)`)

// A dependency is a module that supplies code of the program.
type dependency struct {
	path, version, sum string
	licence            string            // as SPDX has it
	texts              map[string]string // by name of file
}

// dependencies returns the modules from which the programs were linked, Go's own library first.
func (b *build) dependencies() ([]dependency, error) {
	all := []dependency{{path: "std", version: b.made[0].info.GoVersion}}
	args := []string{"list", "-m", "-json"}
	for _, m := range b.modules() {
		if m.Replace != nil {
			return nil, fmt.Errorf("module %s is replaced by %s: its licence would be another", m.Path, m.Replace.Path)
		}
		all = append(all, dependency{path: m.Path, version: m.Version, sum: m.Sum})
		args = append(args, m.Path)
	}
	dirs, err := b.moduleDirs(args)
	if err != nil {
		return nil, err
	}
	root, err := b.output("go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	dirs["std"] = strings.TrimSpace(root)
	for i := range all {
		d := &all[i]
		if d.texts, err = licenceTexts(dirs[d.path]); err != nil {
			return nil, fmt.Errorf("module %s: %w", d.path, err)
		}
		if d.licence, err = licenceOf(d.texts); err != nil {
			return nil, fmt.Errorf("module %s: %w", d.path, err)
		}
	}
	return all, nil
}

// modules returns the modules from which any of the programs was linked, sorted by path.
func (b *build) modules() (all []*debug.Module) {
	for _, p := range b.made {
		for _, m := range p.info.Deps {
			if !slices.ContainsFunc(all, func(have *debug.Module) bool { return have.Path == m.Path }) {
				all = append(all, m)
			}
		}
	}
	slices.SortFunc(all, func(x, y *debug.Module) int { return strings.Compare(x.Path, y.Path) })
	return all
}

// moduleDirs returns the directory of each module in the module cache, by path.
func (b *build) moduleDirs(args []string) (map[string]string, error) {
	dirs := map[string]string{}
	out, err := run(exec.CommandContext(b.ctx, "go", args...))
	if err != nil {
		return nil, err
	}
	for d := json.NewDecoder(strings.NewReader(out)); ; {
		var m struct{ Path, Dir string }
		if err := d.Decode(&m); errors.Is(err, io.EOF) {
			return dirs, nil
		} else if err != nil {
			return nil, err
		}
		dirs[m.Path] = m.Dir
	}
}

// licenceTexts reads the licence files of a module.
func licenceTexts(dir string) (map[string]string, error) {
	if dir == "" {
		return nil, errors.New("it is not in the module cache")
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	texts := map[string]string{}
	for _, e := range entries {
		if e.Type().IsRegular() && licenceFile.MatchString(e.Name()) {
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				return nil, err
			}
			texts[e.Name()] = string(text)
		}
	}
	if len(texts) == 0 {
		return nil, errors.New("it has no licence file")
	}
	return texts, nil
}

// marks are sentences by which licences are recognised. A text may hold several of them. If one is a
// choice (OR), no other counts. The sentence of BSD-2-Clause does not count beside that of BSD-3-Clause,
// because the text of BSD-3-Clause holds both.
var marks = []struct{ licence, sentence string }{
	{"BSD-3-Clause OR GPL-2.0-only", "spdx-license-identifier: bsd-3-clause or gpl-2.0-only"},
	{"Apache-2.0", "apache license version 2.0"},
	{"Apache-2.0", "apache license, version 2.0"},
	{"BSD-3-Clause", "neither the name"},
	{"BSD-2-Clause", "redistribution and use in source and binary forms"},
	{"MIT", "permission is hereby granted, free of charge"},
}

// licenceOf names the licences that a module is under. A file that holds two licences counts for both.
func licenceOf(texts map[string]string) (string, error) {
	var found []string
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		if !regexp.MustCompile(`(?i)^(licen[cs]e|copying)`).MatchString(name) {
			continue
		}
		for _, l := range licencesIn(texts[name]) {
			if !slices.Contains(found, l) {
				found = append(found, l)
			}
		}
	}
	if len(found) == 0 {
		return "", errors.New("its licence is not one of those that are known here")
	}
	return strings.Join(found, " AND "), nil
}

func licencesIn(text string) (found []string) {
	text = strings.ToLower(strings.Join(strings.Fields(text), " "))
	for _, m := range marks {
		if !strings.Contains(text, m.sentence) {
			continue
		}
		switch {
		case strings.Contains(m.licence, " OR "):
			return []string{m.licence}
		case slices.Contains(found, m.licence), m.licence == "BSD-2-Clause" && slices.Contains(found, "BSD-3-Clause"):
		default:
			found = append(found, m.licence)
		}
	}
	return found
}

// licences installs our licence, the licences of all modules from which the programs
// were linked, and the list of licences that Debian wants.
func (b *build) licences() error {
	all, err := b.dependencies()
	if err != nil {
		return err
	}
	b.add("LICENSE", "/usr/share/doc/ipoibcm/licenses/ipoibcm/LICENSE", 0o644)
	list := "ipoibcm is under the Apache License, Version 2.0; the text is in\n" +
		"/usr/share/doc/ipoibcm/licenses/ipoibcm, and on Debian in\n/usr/share/common-licenses/Apache-2.0.\n\n" +
		"Copyright (c) 2026 the authors of ipoibcm, as its history names them\n\n" +
		"Its programs are static, and linked from what follows; their texts are below\n/usr/share/doc/ipoibcm/licenses.\n\n"
	for _, d := range all {
		list += fmt.Sprintf("%s %s: %s\n", d.path, d.version, d.licence)
		for _, name := range slices.Sorted(maps.Keys(d.texts)) {
			if err := b.write("/usr/share/doc/ipoibcm/licenses/"+d.path+"/"+name, []byte(d.texts[name])); err != nil {
				return err
			}
		}
	}
	return b.write("/usr/share/doc/ipoibcm/copyright", []byte(list))
}

// vcs returns a setting of the build.
func vcs(info *debug.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}
