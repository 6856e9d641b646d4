package main

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// The bill of materials is a document of SPDX 2.3, as its JSON schema has it.
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

// bill installs the list of what the program was linked from, as its build
// information has it.
func (b *build) bill() error {
	program, err := os.ReadFile(b.files[0].from)
	if err != nil {
		return err
	}
	all, err := b.dependencies()
	if err != nil {
		return err
	}
	doc, err := json.MarshalIndent(billOf(program, all, b.version, b.epoch, vcs(b.info, "vcs.revision")), "", "  ")
	if err != nil {
		return err
	}
	return b.write("/usr/share/doc/ipoibcm/ipoibcm.spdx.json", append(doc, '\n'))
}

func billOf(program []byte, all []dependency, version string, at time.Time, commit string) spdxDocument {
	const document, product = "SPDXRef-DOCUMENT", "SPDXRef-Package-ipoibcm"
	sum := sha256.Sum256(program)
	hash := hex.EncodeToString(sum[:])
	doc := spdxDocument{
		Version: "SPDX-2.3", DataLicense: "CC0-1.0", ID: document, Name: name + "-" + version,
		Namespace: "https://spdx.org/spdxdocs/" + name + "-" + version + "-" + hash,
		Creation:  spdxCreation{Created: at.Format(time.RFC3339), Creators: []string{"Tool: ipoibcm-internal-packages"}},
		Packages: []spdxPackage{{
			Name: name, ID: product, Version: version, FileName: "/usr/bin/ipoibcmd", Download: noAssertion, Purpose: "APPLICATION",
			Checksums:        []spdxChecksum{{"SHA256", hash}},
			LicenseConcluded: "Apache-2.0", LicenseDeclared: "Apache-2.0", Copyright: noAssertion, Source: strings.TrimSpace("commit " + commit),
		}},
		Relationships: []spdxRelation{{document, "DESCRIBES", product}},
	}
	for i, d := range all {
		p := spdxPackage{Name: d.path, ID: fmt.Sprintf("SPDXRef-Package-%d", i), Version: d.version, Download: "https://proxy.golang.org/" + d.path + "/@v/" + d.version + ".zip",
			LicenseConcluded: d.licence, LicenseDeclared: d.licence, Copyright: noAssertion, Purpose: "LIBRARY",
			Refs: []spdxRef{{"PACKAGE-MANAGER", "purl", "pkg:golang/" + d.path + "@" + d.version}}}
		if d.path == "std" {
			p.Download = "https://go.dev/dl/" + d.version + ".src.tar.gz"
			p.Refs[0].Locator = "pkg:golang/std@" + strings.TrimPrefix(d.version, "go")
		}
		if h := treeHash(d.sum); h != "" {
			p.Source = "SHA-256 over the hashes of its files (h1 of go.sum): " + h
		}
		doc.Packages = append(doc.Packages, p)
		doc.Relationships = append(doc.Relationships, spdxRelation{product, "STATIC_LINK", p.ID})
	}
	return doc
}

// treeHash returns the hash of go.sum as hexadecimal digits.
func treeHash(sum string) string {
	raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(sum, "h1:"))
	if err != nil || len(raw) != sha256.Size {
		return ""
	}
	return hex.EncodeToString(raw)
}
