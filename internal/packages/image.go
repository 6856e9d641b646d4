package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// imageUser is the user and the group that the container runs as. Distributions assign no
// number above 60000 by themselves.
const imageUser = 65532

// capNetAdmin is CAP_NET_ADMIN of capabilities(7).
const capNetAdmin = 12

// Media types of the OCI image format, version 1.
const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type imageManifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Config        descriptor        `json:"config"`
	Layers        []descriptor      `json:"layers"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

type imageIndex struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type imageConfig struct {
	Created string `json:"created"`
	platform
	Config  imageRun       `json:"config"`
	RootFS  imageRootFS    `json:"rootfs"`
	History []imageHistory `json:"history"`
}

type imageRun struct {
	User       string
	Entrypoint []string
	Cmd        []string
	Env        []string
	WorkingDir string
	StopSignal string
	Labels     map[string]string
}

type imageRootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

type imageHistory struct {
	Created   string `json:"created"`
	CreatedBy string `json:"created_by"`
}

// blobs are the contents of an image, by digest.
type blobs map[string][]byte

func (b blobs) put(mediaType string, content []byte) descriptor {
	d := digest(content)
	b[d] = content
	return descriptor{MediaType: mediaType, Digest: d, Size: len(content)}
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// image writes an OCI image of one layer, as a tar archive of its layout.
func (b *build) image(path string) error {
	layer, err := b.layer()
	if err != nil {
		return err
	}
	at := b.epoch.Format(time.RFC3339)
	tag := strings.NewReplacer("~", "-", "+", "-").Replace(b.version)
	labels := map[string]string{
		"org.opencontainers.image.title": name, "org.opencontainers.image.description": summary,
		"org.opencontainers.image.licenses": "Apache-2.0", "org.opencontainers.image.version": b.version,
		"org.opencontainers.image.created": at, "org.opencontainers.image.revision": b.commit(),
	}
	p := platform{b.arch, "linux"}
	all := blobs{}
	config, err := json.Marshal(imageConfig{
		Created: at, platform: p, RootFS: imageRootFS{"layers", []string{digest(layer)}},
		History: []imageHistory{{at, "ipoibcm internal/packages"}},
		Config: imageRun{User: fmt.Sprintf("%d:%d", imageUser, imageUser), Entrypoint: []string{"/usr/bin/ipoibcmd"},
			Cmd: []string{"run", "--config", "/etc/ipoibcm/ibcm0.yaml"}, Env: []string{"PATH=/usr/bin"}, WorkingDir: "/",
			StopSignal: "SIGTERM", Labels: labels},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal(imageManifest{2, typeManifest, all.put(typeConfig, config),
		[]descriptor{all.put(typeLayer, packed(layer))}, labels})
	if err != nil {
		return err
	}
	d := all.put(typeManifest, manifest)
	d.Platform, d.Annotations = &p, map[string]string{"org.opencontainers.image.ref.name": name + ":" + tag}
	index, err := json.Marshal(imageIndex{2, typeIndex, []descriptor{d}})
	if err != nil {
		return err
	}
	return b.archive(path, all, index)
}

// archive writes the layout of an image.
func (b *build) archive(path string, all blobs, index []byte) error {
	var out bytes.Buffer
	w := treeWriter{tar.NewWriter(&out), b.epoch}
	w.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644, tar.Header{})
	w.file("index.json", index, 0o644, tar.Header{})
	for _, d := range slices.Sorted(maps.Keys(all)) {
		w.file("blobs/"+strings.Replace(d, ":", "/", 1), all[d], 0o644, tar.Header{})
	}
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}

// inImage reports whether the image also has this file of the packages. It has the programs, the
// licence texts, the copyright file and the SPDX bill of materials.
func inImage(to string) bool {
	return slices.ContainsFunc([]string{"/usr/bin/", "/usr/lib/cni/", "/usr/share/doc/ipoibcm/licenses/",
		"/usr/share/doc/ipoibcm/copyright", "/usr/share/doc/ipoibcm/ipoibcm.spdx.json"},
		func(p string) bool { return strings.HasPrefix(to, p) })
}

// layer returns the image's only layer, not compressed.
func (b *build) layer() ([]byte, error) {
	var out bytes.Buffer
	w := treeWriter{tar.NewWriter(&out), b.epoch}
	w.dir("etc", tar.Header{})
	w.file("etc/passwd", fmt.Appendf(nil, "root:x:0:0:root:/:/sbin/nologin\n%s:x:%d:%d::/:/sbin/nologin\n", name,
		imageUser, imageUser), 0o644, tar.Header{})
	w.file("etc/group", fmt.Appendf(nil, "root:x:0:\n%s:x:%d:\n", name, imageUser), 0o644, tar.Header{})
	w.dir("etc/ipoibcm", tar.Header{})
	w.dir("run", tar.Header{})
	w.dir("run/ipoibcm", tar.Header{Uid: imageUser, Gid: imageUser})
	made := map[string]bool{}
	files := slices.Clone(b.files)
	slices.SortFunc(files, func(x, y file) int { return strings.Compare(x.to, y.to) })
	for _, f := range files {
		if !inImage(f.to) {
			continue
		}
		to := strings.TrimPrefix(f.to, "/")
		for i, r := range to {
			if r == '/' && !made[to[:i]] {
				made[to[:i]] = true
				w.dir(to[:i], tar.Header{})
			}
		}
		content, err := os.ReadFile(f.from)
		if err != nil {
			return nil, err
		}
		var h tar.Header
		if f.to == programs[0].to {
			h.Format = tar.FormatPAX
			h.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": string(fileCapability(capNetAdmin))}
		}
		w.file(to, content, f.mode, h)
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// fileCapability returns the attribute security.capability of a program that may use
// capability c: struct vfs_cap_data, revision 2 (linux/capability.h). It makes c
// permitted but not effective. So the program starts even in a container that withholds
// c, and can print what it lacks.
func fileCapability(c int) []byte {
	b := make([]byte, 20) // revision, and twice 32 bits of permitted and of inheritable
	binary.LittleEndian.PutUint32(b, 0x02000000)
	binary.LittleEndian.PutUint32(b[4+8*(c/32):], 1<<(c%32))
	return b
}

// A treeWriter writes files that all have the time at. Close returns an error of any write.
type treeWriter struct {
	*tar.Writer
	at time.Time
}

// dir writes a directory. more has its owner.
func (w treeWriter) dir(name string, more tar.Header) {
	more.Name, more.Typeflag, more.Mode, more.ModTime = name+"/", tar.TypeDir, 0o755, w.at
	_ = w.WriteHeader(&more)
}

// file writes a file. more has its extended attributes.
func (w treeWriter) file(name string, content []byte, mode os.FileMode, more tar.Header) {
	more.Name, more.Typeflag, more.Mode, more.ModTime = name, tar.TypeReg, int64(mode.Perm()), w.at
	more.Size = int64(len(content))
	_ = w.WriteHeader(&more)
	_, _ = w.Write(content)
}
