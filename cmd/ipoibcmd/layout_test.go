package main

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTableFitsTheLine(t *testing.T) {
	g := newTable("PEER", "MODE", "RTT", "ADDRESSES")
	g.add("fe80::a", "RC", "71 µs", "10.0.0.2 fd00::2")
	g.add("fe80::b", "UD", "", "10.0.0.3")
	for _, tt := range []struct{ name, columns, want string }{
		{"all beside each other", "80",
			"PEER     MODE  RTT    ADDRESSES\nfe80::a  RC    71 µs  10.0.0.2 fd00::2\nfe80::b  UD           10.0.0.3\n"},
		{"exactly", "40",
			"PEER     MODE  RTT    ADDRESSES\nfe80::a  RC    71 µs  10.0.0.2 fd00::2\nfe80::b  UD           10.0.0.3\n"},
	} {
		t.Setenv("COLUMNS", tt.columns)
		var b bytes.Buffer
		g.render(&b)
		if got := b.String(); got != tt.want {
			t.Errorf("%s: got\n%s\nwant\n%s", tt.name, got, tt.want)
		}
	}
}

func TestTableFlows(t *testing.T) {
	t.Setenv("COLUMNS", "40")
	g := newTable("PEER", "MODE", "QPN", "CLASS", "ADDRESSES")
	g.add("fe80::a831:11ff:fe43:e8e3", "RC", "0x000048", "", "10.0.0.2 fd00::2 fe80::a831:11ff:fe43:e8e3 10.99.0.2")
	var b bytes.Buffer
	g.render(&b)
	want := `PEER                       MODE
fe80::a831:11ff:fe43:e8e3  RC
  QPN 0x000048
  ADDRESSES 10.0.0.2 fd00::2
    fe80::a831:11ff:fe43:e8e3 10.99.0.2
`
	if got := b.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestWrapKeepsEveryWord(t *testing.T) {
	text := "a warning of many words, one of them anextraordinarilylongonethatisoverthelimit of a line, is kept whole"
	var b bytes.Buffer
	printWrapped(&b, "  ! ", 4, text, 40)
	if got := strings.Join(strings.Fields(strings.TrimPrefix(b.String(), "  ! ")), " "); got != text {
		t.Errorf("got %q, want %q", got, text)
	}
	for _, line := range strings.Split(b.String(), "\n") {
		if utf8.RuneCountInString(line) > 40 && !strings.Contains(line, "extraordinarily") {
			t.Errorf("%q is longer than 40", line)
		}
	}
}
