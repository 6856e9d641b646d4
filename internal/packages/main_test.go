package main

import (
	"encoding/hex"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestReleaseVersion(t *testing.T) {
	for tag, want := range map[string]string{
		"v1.2":               "1.2",
		"1.2.3":              "1.2.3",
		"v1.2-3-gabcdef":     "1.2+3.gabcdef",
		"v1.2-dirty":         "1.2+dirty",
		"v1.2-3-gabcd-dirty": "1.2+3.gabcd.dirty",
	} {
		if got := releaseVersion(tag); got != want {
			t.Errorf("%s: got %q, want %q", tag, got, want)
		}
	}
}

func TestLicencesIn(t *testing.T) {
	const bsd = "Redistribution and use in source and binary forms, with or without\nmodification, are permitted"
	for _, tt := range []struct{ name, text, want string }{
		{"MIT", "Permission is hereby granted,\n\tfree of charge, to", "MIT"},
		{"Apache", "  Apache License\n  Version 2.0, January 2004\n\n Licensed under the Apache License, Version 2.0",
			"Apache-2.0"},
		{"two clauses", bsd, "BSD-2-Clause"},
		{"three clauses", bsd + "\n* Neither the name of Google", "BSD-3-Clause"},
		{"either of two", "SPDX-License-Identifier: BSD-3-Clause OR GPL-2.0-only\n" + bsd, "BSD-3-Clause OR GPL-2.0-only"},
		{"both of two", "Permission is hereby granted, free of charge, to\nLicensed under the Apache License, " +
			"Version 2.0", "Apache-2.0 AND MIT"},
	} {
		got, err := licenceOf(map[string]string{"LICENSE": tt.text, "NOTICE": "Apache License, Version 2.0"})
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	if got, err := licenceOf(map[string]string{"LICENSE": "all rights reserved"}); err == nil {
		t.Errorf("unknown text: got %q, want an error", got)
	}
}

// The octets that setcap cap_net_admin=p writes.
func TestFileCapability(t *testing.T) {
	const want = "0000000200100000" + "00000000" + "00000000" + "00000000"
	if got := hex.EncodeToString(fileCapability(capNetAdmin)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// go.sum has base64, the bill hexadecimal digits.
func TestTreeHash(t *testing.T) {
	if got, want := treeHash("h1:"+strings.Repeat("A", 43)+"="), strings.Repeat("00", 32); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := treeHash(""); got != "" {
		t.Errorf("without a sum: got %q, want nothing", got)
	}
}

// Two things of one name would be one.
func TestBillNames(t *testing.T) {
	doc := billOf([]billed{{to: "/usr/bin/x", from: []string{"std", "example.com/a"}},
		{to: "/usr/lib/y", from: []string{"std"}}}, []dependency{{path: "std", version: "go1.26.8"},
		{path: "example.com/a", version: "v1.0.0", licence: "MIT"}},
		"1.0", time.Unix(0, 0).UTC(), "abc")
	valid := regexp.MustCompile(`^SPDXRef-[A-Za-z0-9.-]+$`)
	ids := map[string]bool{}
	for _, p := range doc.Packages {
		if ids[p.ID] {
			t.Errorf("%s is there twice", p.ID)
		}
		if !valid.MatchString(p.ID) {
			t.Errorf("%q is no identifier of SPDX", p.ID)
		}
		ids[p.ID] = true
	}
	for _, r := range doc.Relationships {
		if !ids[r.To] {
			t.Errorf("%s %s %s: there is no such package", r.Of, r.Kind, r.To)
		}
	}
	if got, want := len(doc.Relationships), 2+2+1; got != want {
		t.Errorf("there are %d relationships, want %d: %v", got, want, doc.Relationships)
	}
	if got, want := doc.Packages[2].Refs[0].Locator, "pkg:golang/std@1.26.8"; got != want {
		t.Errorf("purl of Go: got %s, want %s", got, want)
	}
}

// What docs/dependencies.md says of licences is what the texts say.
func TestDocumentedLicences(t *testing.T) {
	page, err := os.ReadFile("../../docs/dependencies.md")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir("../..")
	b := build{ctx: t.Context()}
	rows := regexp.MustCompile(`(?m)^\| ([a-z0-9.]+\.[a-z]+/[^ ]+) \| v[^ ]+ \| ([^|]+) \|`).
		FindAllStringSubmatch(string(page), -1)
	if len(rows) < 20 {
		t.Fatalf("the page has %d modules, want more", len(rows))
	}
	args := []string{"list", "-m", "-json"}
	for _, r := range rows {
		args = append(args, r[1])
	}
	dirs, err := b.moduleDirs(args)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		if dirs[r[1]] == "" {
			continue // nothing here needs its source
		}
		texts, err := licenceTexts(dirs[r[1]])
		if err != nil {
			t.Errorf("%s: %v", r[1], err)
			continue
		}
		got, err := licenceOf(texts)
		if err != nil {
			t.Errorf("%s: %v", r[1], err)
			continue
		}
		want := strings.NewReplacer(" and ", " AND ", " or ", " OR ", "GPL-2.0", "GPL-2.0-only", "MIT AND Apache-2.0",
			"Apache-2.0 AND MIT").Replace(
			strings.ReplaceAll(r[2], " and ", " AND "))
		if got != want {
			t.Errorf("%s: its texts say %q, docs/dependencies.md %q", r[1], got, want)
		}
	}
}
