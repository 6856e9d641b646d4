package main

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"time"
)

// An spdxDocument is the bill of materials, a document of SPDX 2.3 with the names of its JSON schema.
type spdxDocument struct {
	Version       string         `json:"spdxVersion"`
	DataLicense   string         `json:"dataLicense"`
	ID            string         `json:"SPDXID"`
	Name          string         `json:"name"`
	Namespace     string         `json:"documentNamespace"`
	Creation      spdxCreation   `json:"creationInfo"`
	Packages      []spdxPackage  `json:"packages"`
	Relationships []spdxRelation `json:"relationships"`
}

type spdxCreation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	Name             string         `json:"name"`
	ID               string         `json:"SPDXID"`
	Version          string         `json:"versionInfo"`
	FileName         string         `json:"packageFileName,omitempty"`
	Download         string         `json:"downloadLocation"`
	FilesAnalyzed    bool           `json:"filesAnalyzed"`
	Checksums        []spdxChecksum `json:"checksums,omitempty"`
	LicenseConcluded string         `json:"licenseConcluded"`
	LicenseDeclared  string         `json:"licenseDeclared"`
	Copyright        string         `json:"copyrightText"`
	Source           string         `json:"sourceInfo,omitempty"`
	Refs             []spdxRef      `json:"externalRefs,omitempty"`
	Purpose          string         `json:"primaryPackagePurpose,omitempty"`
}

type spdxChecksum struct {
	Algorithm string `json:"algorithm"`
	Value     string `json:"checksumValue"`
}

type spdxRef struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type spdxRelation struct {
	Of   string `json:"spdxElementId"`
	Kind string `json:"relationshipType"`
	To   string `json:"relatedSpdxElement"`
}

const noAssertion = "NOASSERTION"

// bill installs the bill of materials: the modules from which the programs were
// linked, according to their build information.
func (b *build) bill() error {
	all, err := b.dependencies()
	if err != nil {
		return err
	}
	var parts []billed
	for _, p := range b.made {
		text, err := os.ReadFile(p.path)
		if err != nil {
			return err
		}
		part := billed{to: p.to, sum: sha256.Sum256(text), from: []string{"std"}}
		for _, m := range p.info.Deps {
			part.from = append(part.from, m.Path)
		}
		parts = append(parts, part)
	}
	doc, err := json.MarshalIndent(billOf(parts, all, b.version, b.epoch, b.commit()), "", "  ")
	if err != nil {
		return err
	}
	return b.write("/usr/share/doc/ipoibcm/ipoibcm.spdx.json", append(doc, '\n'))
}

// A billed is one program of the bill, with the paths of the modules from which it was linked.
type billed struct {
	to   string
	sum  [sha256.Size]byte
	from []string
}

func billOf(programs []billed, all []dependency, version string, at time.Time, commit string) spdxDocument {
	const document = "SPDXRef-DOCUMENT"
	doc := spdxDocument{
		Version: "SPDX-2.3", DataLicense: "CC0-1.0", ID: document, Name: name + "-" + version,
		Namespace: "https://spdx.org/spdxdocs/" + name + "-" + version + "-" + hex.EncodeToString(programs[0].sum[:]),
		Creation:  spdxCreation{Created: at.Format(time.RFC3339), Creators: []string{"Tool: ipoibcm-internal-packages"}},
	}
	for _, p := range programs {
		id := "SPDXRef-Program-" + path.Base(p.to)
		doc.Packages = append(doc.Packages, spdxPackage{
			Name: path.Base(p.to), ID: id, Version: version, FileName: p.to, Download: noAssertion, Purpose: "APPLICATION",
			Checksums:        []spdxChecksum{{"SHA256", hex.EncodeToString(p.sum[:])}},
			LicenseConcluded: "Apache-2.0", LicenseDeclared: "Apache-2.0", Copyright: noAssertion,
			Source: strings.TrimSpace("commit " + commit),
		})
		doc.Relationships = append(doc.Relationships, spdxRelation{document, "DESCRIBES", id})
	}
	for i, d := range all {
		p := spdxPackage{Name: d.path, ID: fmt.Sprintf("SPDXRef-Package-%d", i), Version: d.version,
			Download: "https://proxy.golang.org/" + d.path + "/@v/" + d.version + ".zip", LicenseConcluded: d.licence,
			LicenseDeclared: d.licence, Copyright: noAssertion, Purpose: "LIBRARY",
			Refs: []spdxRef{{"PACKAGE-MANAGER", "purl", "pkg:golang/" + d.path + "@" + d.version}}}
		if d.path == "std" {
			p.Download = "https://go.dev/dl/" + d.version + ".src.tar.gz"
			p.Refs[0].Locator = "pkg:golang/std@" + strings.TrimPrefix(d.version, "go")
		}
		if h := treeHash(d.sum); h != "" {
			p.Source = "SHA-256 over the hashes of its files (h1 of go.sum): " + h
		}
		doc.Packages = append(doc.Packages, p)
		for _, by := range programs {
			if slices.Contains(by.from, d.path) {
				doc.Relationships = append(doc.Relationships,
					spdxRelation{"SPDXRef-Program-" + path.Base(by.to), "STATIC_LINK", p.ID})
			}
		}
	}
	return doc
}

// treeHash converts a hash of go.sum, "h1:" and base64, to hexadecimal digits. It returns "" for
// anything else.
func treeHash(sum string) string {
	raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(sum, "h1:"))
	if err != nil || len(raw) != sha256.Size {
		return ""
	}
	return hex.EncodeToString(raw)
}
