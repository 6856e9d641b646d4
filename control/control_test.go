package control

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

var update = flag.Bool("update", false, "write testdata/schema.txt anew")

// documents are all that programs read.
var documents = []any{Error{}, Status{}, Conns{}, Neighbours{}, Routes{}, Groups{}, Stats{}, Explanation{},
	Event{}, Devices{}, Doctor{}, Runtime{}, MPAProbe{}, RPCProbe{}, PeerStatus{}, PeerPing{}, PeerEvents{},
	Build{}, Reload{}, Members{}}

// TestSchema compares every field's name and kind with the golden file. A line
// may be added; one that goes or changes needs a new Version.
func TestSchema(t *testing.T) {
	var b strings.Builder
	for _, d := range documents {
		typ := reflect.TypeOf(d)
		fmt.Fprintf(&b, "%s\n", typ.Name())
		describe(&b, typ, "\t")
	}
	const golden = "testdata/schema.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got := b.String(); got != string(want) {
		t.Errorf("the schema changed (go test ./control -update, and review); it is now\n%s", got)
	}
}

func describe(b *strings.Builder, typ reflect.Type, indent string) {
	for _, f := range reflect.VisibleFields(typ) {
		tag := f.Tag.Get("json")
		inner := f.Type
		list := ""
		if inner.Kind() == reflect.Slice {
			inner, list = inner.Elem(), "[]"
		}
		if inner.Kind() == reflect.Pointer && inner.Elem().Kind() == reflect.Struct {
			inner, list = inner.Elem(), list+"*"
		}
		if inner.Kind() != reflect.Struct || inner == reflect.TypeFor[time.Time]() {
			fmt.Fprintf(b, "%s%s %s%s\n", indent, tag, list, inner)
			continue
		}
		fmt.Fprintf(b, "%s%s %s{}\n", indent, tag, list)
		describe(b, inner, indent+"\t")
	}
}

// TestRoundTrip fills every field of every document, writes it as JSON and
// reads the same.
func TestRoundTrip(t *testing.T) {
	for _, d := range documents {
		in := reflect.New(reflect.TypeOf(d))
		n := 0
		fill(in.Elem(), &n)
		b, err := json.Marshal(in.Interface())
		if err != nil {
			t.Fatal(err)
		}
		out := reflect.New(reflect.TypeOf(d))
		dec := json.NewDecoder(strings.NewReader(string(b)))
		dec.DisallowUnknownFields()
		if err := dec.Decode(out.Interface()); err != nil {
			t.Errorf("%T: %v", d, err)
		}
		if !reflect.DeepEqual(in.Interface(), out.Interface()) {
			t.Errorf("%T: wrote %+v, read %+v", d, in, out)
		}
	}
}

// fill gives every field below v a value of its own.
func fill(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprint("s", *n))
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Uint64:
		v.SetUint(1<<53 + uint64(*n)) // more than a float64 holds
	case reflect.Uint32:
		v.SetUint(1<<31 + uint64(*n))
	case reflect.Float64:
		v.SetFloat(float64(*n) + 0.125)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(v.Index(i), n)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, val := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, n)
		fill(val, n)
		v.SetMapIndex(key, val)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(1e9, int64(*n)).UTC()))
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	default:
		panic("a kind that documents do not have: " + v.Kind().String())
	}
}

func TestEveryDocumentHasAVersion(t *testing.T) {
	for _, d := range documents {
		f, ok := reflect.TypeOf(d).FieldByName("Version")
		expect.MustEqual(t, ok, true, "%T: ok", d)
		expect.Equal(t, f.Tag.Get("json"), "version", "%T: Tag.Get(\"json\")", d)
		expect.Equal(t, f.Index[0], 0, "%T: Index[0]", d)
	}
}

func TestSocketPath(t *testing.T) {
	if got := SocketPath("ibcm0"); got != "/run/ipoibcm/ibcm0.sock" {
		t.Errorf("got %s", got)
	}
}
