package control

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A call is one request of the API: what OpenAPI says beside the types.
type call struct {
	path, method, summary string
	params                []param
	answer                any    // nil: media
	media                 string // of an answer that is no document
}

type param struct {
	name, kind, text string
	required         bool
}

var (
	pageParams = []param{{"peer", "string", "only those of this peer: a GID or an IP address", false},
		{"limit", "integer", "at most so many, in the order of their keys as text", false},
		{"after", "string", "those behind this key, the next of the page before", false}}
	ipParam = param{"ip", "string", "an IP address", true}
)

// calls are all there are.
var calls = []call{
	{PathStatus, "get", "the whole interface: state, warnings, peers", pageParams, Status{}, ""},
	{PathConns, "get", "connections", pageParams, Conns{}, ""},
	{PathNeigh, "get", "the neighbour cache", pageParams, Neighbours{}, ""},
	{PathRoutes, "get", "next hops", pageParams, Routes{}, ""},
	{PathGroups, "get", "multicast groups", nil, Groups{}, ""},
	{PathStats, "get", "all counters", nil, Stats{}, ""},
	{PathMembers, "get", "who gets copies of broadcasts without multicast", nil, Members{}, ""},
	{PathExplain, "get", "where a packet would go, and why", []param{ipParam}, Explanation{}, ""},
	{PathEvents, "get", "events, until the client leaves: one JSON object in a line",
		[]param{{"since", "string", "past ones too, of a duration such as 10m", false}}, Event{}, "application/x-ndjson"},
	{PathCapture, "get", "packets, until the client leaves; root and the agent's user only",
		[]param{{"snap", "integer", "octets of each packet", false}}, nil, "application/x-pcapng"},
	{PathPeerStatus, "get", "the status of another host's agent, asked over the fabric", []param{ipParam},
		PeerStatus{}, ""},
	{PathPeerPing, "get", "calls to another host's agent",
		[]param{ipParam, {"count", "integer", "how many", false}, {"size", "integer", "octets to return", false}},
		PeerPing{}, ""},
	{PathPeerEvents, "get", "events of another host's agent",
		[]param{ipParam, {"after", "integer", "those behind this number", false}}, PeerEvents{}, ""},
	{PathRuntime, "get", "what the process uses; root and the agent's user only", nil, Runtime{}, ""},
	{PathMetrics, "get", "Prometheus text", nil, nil, "text/plain"},
	{PathReload, "post", "read the configuration file again; root and the agent's user only",
		[]param{{"check", "string", "not empty: change nothing", false}}, Reload{}, ""},
}

type object map[string]any

// openAPI describes the API as OpenAPI 3.0 has it.
func openAPI() object {
	schemas, paths := object{}, object{}
	for _, c := range calls {
		content := object{}
		switch {
		case c.answer == nil:
			content[c.media] = object{"schema": object{"type": "string", "format": "binary"}}
		default:
			media := c.media
			if media == "" {
				media = "application/json"
			}
			content[media] = object{"schema": schemaOf(schemas, reflect.TypeOf(c.answer))}
		}
		op := object{"summary": c.summary, "responses": object{
			"200": object{"description": "the answer", "content": content},
			"default": object{"description": "what went wrong",
				"content": object{"application/json": object{"schema": schemaOf(schemas, reflect.TypeFor[Error]())}}},
		}}
		var params []object
		for _, p := range c.params {
			params = append(params, object{"name": p.name, "in": "query", "required": p.required, "description": p.text,
				"schema": object{"type": p.kind}})
		}
		if params != nil {
			op["parameters"] = params
		}
		paths[c.path] = object{c.method: op}
	}
	return object{
		"openapi": "3.0.3",
		"info": object{"title": "ipoibcmd control API", "version": strconv.Itoa(Version),
			"description": "HTTP over a UNIX socket, /run/ipoibcm/NAME.sock. Durations are in milliseconds, sizes in " +
				"octets, times in UTC."},
		"paths": paths, "components": object{"schemas": schemas},
	}
}

// schemaOf describes a type; structs go to all.
func schemaOf(all object, t reflect.Type) object {
	switch t.Kind() {
	case reflect.Pointer:
		return schemaOf(all, t.Elem())
	case reflect.Slice:
		return object{"type": "array", "items": schemaOf(all, t.Elem())}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": schemaOf(all, t.Elem())}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Float64:
		return object{"type": "number"}
	case reflect.String:
		return object{"type": "string"}
	case reflect.Struct:
	default:
		return object{"type": "integer", "format": "int64"}
	}
	if t == reflect.TypeFor[time.Time]() {
		return object{"type": "string", "format": "date-time"}
	}
	ref := object{"$ref": "#/components/schemas/" + t.Name()}
	if _, known := all[t.Name()]; known {
		return ref
	}
	all[t.Name()] = nil // it may hold itself
	fields := object{}
	var required []string
	for _, f := range reflect.VisibleFields(t) {
		name, rest, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" || name == "-" {
			continue
		}
		fields[name] = schemaOf(all, f.Type)
		if rest != "omitempty" {
			required = append(required, name)
		}
	}
	s := object{"type": "object", "properties": fields}
	if required != nil {
		s["required"] = required
	}
	all[t.Name()] = s
	return ref
}

// docs/openapi.json is what the types and the table of requests make.
func TestOpenAPI(t *testing.T) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", " ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(openAPI()); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("..", "docs", "openapi.json")
	if *update {
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b.Bytes(), want) {
		t.Error("docs/openapi.json is not what the code says: go test ./control -update, and review")
	}
}

// Every path that the package names is described.
func TestOpenAPIHasEveryPath(t *testing.T) {
	described := map[string]bool{}
	for _, c := range calls {
		described[c.path] = true
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 || !strings.HasPrefix(spec.Names[0].Name, "Path") {
				return true
			}
			if lit, ok := spec.Values[0].(*ast.BasicLit); ok && lit.Kind == token.STRING {
				value, _ := strconv.Unquote(lit.Value)
				if found++; !described[value] {
					t.Errorf("%s, %s, is not described", spec.Names[0].Name, value)
				}
			}
			return true
		})
	}
	if found != len(calls) {
		t.Errorf("%d paths in the package, %d described", found, len(calls))
	}
}
