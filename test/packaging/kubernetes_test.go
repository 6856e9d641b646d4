package packaging

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"ipoibcm/internal/gotool"
	"ipoibcm/internal/long"
)

// What looks at the examples, and where its schemas come from: Kubernetes and the definition of Multus's
// resource, by their releases as modules.
var kubeconform = gotool.Program{Module: "github.com/yannh/kubeconform", Version: "v0.7.0", Package: "./cmd/kubeconform"}

const (
	kubernetes      = "k8s.io/kubernetes@v1.34.1"
	networkDefiners = "github.com/k8snetworkplumbingwg/network-attachment-definition-client@v1.7.7"
)

// TestKubernetesExamples has kubeconform look at the examples for Kubernetes, strictly: each key is one
// that the release of Kubernetes and the definition of Multus's resource have.
func TestKubernetesExamples(t *testing.T) {
	cache := root + "/.cache"
	schemas, err := filepath.Abs(cache + "/schemas-v1.34.1-v1.7.7")
	if err != nil {
		t.Fatal(err)
	}
	_, err = os.Stat(schemas + "/daemonset.json")
	missing := errors.Is(err, fs.ErrNotExist)
	if !ci && !long.Form() && (missing || !kubeconform.Built(cache)) {
		t.Skip("kubeconform and its schemas are not made yet: make test-long does that")
	}
	program, err := kubeconform.Build(t.Context(), cache)
	if err != nil {
		t.Fatal(err)
	}
	if missing {
		makeSchemas(t, schemas)
	}
	check := func(manifest string) (string, error) {
		c := exec.CommandContext(t.Context(), program, "-strict", "-summary", "-schema-location",
			schemas+"/{{.ResourceKind}}.json", "-")
		c.Stdin = strings.NewReader(manifest)
		out, err := c.CombinedOutput()
		return string(out), err
	}
	for _, tt := range []struct{ file, from, to string }{
		{"node.yaml", "hostNetwork:", "hostNetwerk:"},
		{"node.yaml", "runAsUser: 0", "runAsUser: root"},
		{"network.yaml", "config: |", "configuration: |"},
	} {
		text, err := os.ReadFile(root + "/packaging/kubernetes/" + tt.file)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := check(string(text)); err != nil || !strings.Contains(out, "Valid: 1") {
			t.Errorf("%s: %v\n%s", tt.file, err, out)
		}
		wrong := strings.Replace(string(text), tt.from, tt.to, 1)
		if wrong == string(text) {
			t.Errorf("%s has no %q", tt.file, tt.from)
		}
		if out, err := check(wrong); err == nil {
			t.Errorf("%s with %q is taken\n%s", tt.file, tt.to, out)
		}
	}
}

// makeSchemas writes the schemas that kubeconform compares with.
func makeSchemas(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					OpenAPI map[string]any `yaml:"openAPIV3Schema"`
				}
			}
		}
	}
	if err := yaml.Unmarshal(moduleFile(t, networkDefiners, "artifacts/networks-crd.yaml"), &crd); err != nil {
		t.Fatal(err)
	}
	if len(crd.Spec.Versions) != 1 {
		t.Fatalf("%d versions of the resource, want 1", len(crd.Spec.Versions))
	}
	network := crd.Spec.Versions[0].Schema.OpenAPI
	properties, ok := network["properties"].(map[string]any)
	if !ok {
		t.Fatalf("%s: its schema has no properties", networkDefiners)
	}
	for key, kind := range map[string]string{"apiVersion": "string", "kind": "string", "metadata": "object"} {
		properties[key] = map[string]any{"type": kind} // which every resource has
	}
	writeSchema(t, dir+"/networkattachmentdefinition.json", network)
	var api map[string]any
	if err := json.Unmarshal(moduleFile(t, kubernetes, "api/openapi-spec/swagger.json"), &api); err != nil {
		t.Fatal(err)
	}
	writeSchema(t, dir+"/daemonset.json", map[string]any{"definitions": api["definitions"],
		"$ref": "#/definitions/io.k8s.api.apps.v1.DaemonSet"})
}

// moduleFile reads a file of a module, which it downloads if need be.
func moduleFile(t *testing.T, module, file string) []byte {
	t.Helper()
	path, version, _ := strings.Cut(module, "@")
	dir, err := gotool.Source(t.Context(), path, version)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// writeSchema writes an OpenAPI schema as a JSON schema that knows no other keys.
func writeSchema(t *testing.T, path string, schema map[string]any) {
	t.Helper()
	if len(schema) == 0 {
		t.Fatalf("%s: nothing is there to write", path)
	}
	text, err := json.Marshal(closed(schema))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// closed returns a schema whose objects have no keys but their own.
func closed(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = closed(v[i])
		}
	case map[string]any:
		if v["format"] == "int-or-string" {
			return map[string]any{"type": []string{"integer", "string"}}
		}
		for key, x := range v {
			v[key] = closed(x)
		}
		_, has := v["properties"].(map[string]any)
		if _, open := v["additionalProperties"]; has && !open && v["type"] == "object" {
			v["additionalProperties"] = false
		}
	}
	return v
}

// What is closed takes no key that it has not, and what is open stays so.
func TestClosedSchema(t *testing.T) {
	var in any
	text := `{"type":"object","properties":{"a":{"type":"object"},"b":{"format":"int-or-string","type":"string"}}}`
	if err := json.Unmarshal([]byte(text), &in); err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(closed(in))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"additionalProperties":false,"properties":{"a":{"type":"object"},"b":{"type":["integer","string"]}},"type":"object"}`
	if !bytes.Equal(got, []byte(want)) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
