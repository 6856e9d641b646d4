package peerrpc

import (
	"bytes"
	"testing"

	"ipoibcm/internal/expect"
)

func TestRange(t *testing.T) {
	b := Range{1 << 40, 7}.Append(nil)
	if !bytes.Equal(b, []byte("\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x07")) {
		t.Errorf("%x", b)
	}
	if r, err := ParseRange(b); err != nil || r != (Range{1 << 40, 7}) {
		t.Error(r, err)
	}
	for _, n := range []int{0, 11, 13} {
		if _, err := ParseRange(make([]byte, n)); err == nil {
			t.Errorf("%d octets were taken", n)
		}
	}
}

func TestDocument(t *testing.T) {
	for _, s := range []string{"", "a", "abc", "abcd", "abcde"} {
		b := AppendDocument(nil, []byte(s))
		if len(b)%4 != 0 {
			t.Errorf("%q takes %d octets", s, len(b))
		}
		doc, rest, err := ParseDocument(append(bytes.Clone(b), "more"...), nil)
		if err != nil {
			t.Errorf("%q: err is %v, want nil", s, err)
		}
		expect.Equal(t, string(doc), s, "%q: doc", s)
		expect.Equal(t, string(rest), "more", "%q: rest", s)
		switch doc, rest, err = ParseDocument(b[:4], []byte(s+"and what was there before")); {
		case err != nil:
			t.Errorf("%q written: err is %v, want nil", s, err)
		case string(doc) != s:
			t.Errorf("%q written: doc is %v, want %v", s, string(doc), s)
		case len(rest) != 0:
			t.Errorf("%q written: rest has %v elements, want 0", s, len(rest))
		}
		// A peer that offered a Write chunk into which nothing was written.
		switch doc, rest, err = ParseDocument(b, []byte{}); {
		case err != nil:
			t.Errorf("%q inline: err is %v, want nil", s, err)
		case string(doc) != s:
			t.Errorf("%q inline: doc is %v, want %v", s, string(doc), s)
		case len(rest) != 0:
			t.Errorf("%q inline: rest has %v elements, want 0", s, len(rest))
		}
		if len(b) > 4 {
			if _, _, err := ParseDocument(b[:len(b)-1], nil); err == nil {
				t.Errorf("%q without its end was taken", s)
			}
			if _, _, err := ParseDocument(b[:4], []byte(s[1:])); err == nil {
				t.Errorf("%q written short was taken", s)
			}
		}
	}
	if _, _, err := ParseDocument([]byte{0xff, 0xff, 0xff, 0xff}, make([]byte, 8)); err == nil {
		t.Error("4 GiB were taken")
	}
}

// A document of 256 KiB is taken, and an octet more is not, inline or written.
func TestDocumentIsBounded(t *testing.T) {
	for n, want := range map[int]bool{256 << 10: true, 256<<10 + 1: false} {
		length := []byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}
		if doc, _, err := ParseDocument(append(bytes.Clone(length), make([]byte, n+3)...), nil); (err == nil) != want {
			t.Errorf("%d octets inline: %d octets, %v", n, len(doc), err)
		}
		if doc, _, err := ParseDocument(length, make([]byte, n)); (err == nil) != want {
			t.Errorf("%d octets written: %d octets, %v", n, len(doc), err)
		}
	}
}

func TestBatch(t *testing.T) {
	b := AppendBatch(nil, 9, []byte("{}\n{}\n"))
	switch last, lines, err := ParseBatch(b, nil); {
	case err != nil:
		t.Errorf("err is %v, want nil", err)
	case last != 9:
		t.Errorf("last is %v, want 9", last)
	case string(lines) != "{}\n{}\n":
		t.Errorf("lines is %q, want \"{}\\n{}\\n\"", string(lines))
	}
	if _, _, err := ParseBatch(append(b, 0), nil); err == nil {
		t.Error("an octet behind it was taken")
	}
	if _, _, err := ParseBatch(b[:7], nil); err == nil {
		t.Error("7 octets were taken")
	}
}

func TestEcho(t *testing.T) {
	payload := bytes.Repeat([]byte{7}, 5)
	b := AppendEcho(nil, payload)
	for _, tt := range []struct {
		name       string
		b, written []byte
		want       []byte
	}{
		{"among the others", b, nil, payload},
		{"written by itself", b[:4], payload, payload},
		{"empty", AppendEcho(nil, nil), nil, []byte{}},
		{"as much as there may be", AppendEcho(nil, make([]byte, MaxEcho)), nil, make([]byte, MaxEcho)},
		{"more than that", AppendDocument(nil, make([]byte, MaxEcho+1)), nil, nil},
		{"something behind it", append(bytes.Clone(b), 0, 0, 0, 0), nil, nil},
		{"without its end", b[:len(b)-1], nil, nil},
		{"nothing", nil, nil, nil},
	} {
		got, err := ParseEcho(tt.b, tt.written)
		if (err == nil) != (tt.want != nil) {
			t.Errorf("%s: error %v, want one: %v", tt.name, err, tt.want == nil)
		}
		if !bytes.Equal(got, tt.want) {
			t.Errorf("%s: %x, want %x", tt.name, got, tt.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(AppendEcho(nil, []byte("echo")), []byte(nil))
	f.Add(Range{1, 2}.Append(nil), []byte(nil))
	f.Add(AppendBatch(nil, 3, []byte("x\n")), []byte("written"))
	f.Fuzz(func(t *testing.T, b, written []byte) {
		if r, err := ParseRange(b); err == nil && !bytes.Equal(r.Append(nil), b) {
			t.Fatalf("%x became %+v", b, r)
		}
		if last, lines, err := ParseBatch(b, nil); err == nil {
			again := AppendBatch(nil, last, lines)
			if len(again) != len(b) || !bytes.Equal(again[:12+len(lines)], b[:12+len(lines)]) {
				t.Fatalf("%x became %x", b, again)
			}
		}
		if payload, err := ParseEcho(b, nil); err == nil {
			again := AppendEcho(nil, payload)
			if len(again) != len(b) || !bytes.Equal(again[:4+len(payload)], b[:4+len(payload)]) {
				t.Fatalf("%x became %x", b, again)
			}
		}
		if payload, err := ParseEcho(b, written); err == nil && len(payload) > MaxEcho {
			t.Fatal(len(payload))
		}
		if _, doc, err := ParseBatch(b, written); err == nil && len(doc) > MaxDocument {
			t.Fatal(len(doc))
		}
	})
}
