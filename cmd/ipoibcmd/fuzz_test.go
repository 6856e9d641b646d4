package main

import (
	"strings"
	"testing"
)

// FuzzConfig gives run any file. It is refused in words, or its settings are
// within their ranges.
func FuzzConfig(f *testing.F) {
	f.Add(sample)
	for _, s := range []string{
		"", "underlay: eth0\n", "underlay: eth0\nname: averyveryverylongname0\n", "mode: [rc]\n",
		"ud_mtu: -1\nunderlay: e\n", "peers: [fe80::1]\n",
		"pkey: 0x8001\nqkey: 0xffffffff\nunderlay: eth0\n", "idle_timeout: -5s\nunderlay: eth0\n", "a: &a [*a]\n",
		"offload: {gso: maybe}\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<16 {
			return
		}
		c := defaults()
		err := decodeText(&c, b)
		var s settings
		if err == nil {
			s, err = c.settings()
		}
		if err != nil {
			forPeople(t, err)
			return
		}
		switch {
		case c.Underlay == "":
			t.Error("c's Underlay is empty")
		case c.Name == "":
			t.Error("c's Name is empty")
		case len(c.Name) > 15:
			t.Errorf("c's Name has %v elements, want at most 15", len(c.Name))
		case c.UDMTU.most() < 68:
			t.Errorf("accepted %+v, settings %+v", c, s)
		case c.ReceiveMTU < c.UDMTU.most():
			t.Errorf("accepted %+v, settings %+v", c, s)
		}
	})
}

// forPeople checks that an error has words, and none of those of a panic or of our names.
func forPeople(t *testing.T, err error) {
	t.Helper()
	text := err.Error()
	if text == "" {
		t.Error("the error is empty")
	}
	for _, word := range []string{"panic", "main."} {
		if strings.Contains(text, word) {
			t.Errorf("error %q, want it without %q", text, word)
		}
	}
}

// FuzzInterfaces gives run any file with several interfaces. It is refused in words, or they
// have different names.
func FuzzInterfaces(f *testing.F) {
	for _, s := range []string{
		twoInterfaces, "", "interfaces: []\n", "interfaces: [a]\n", "interfaces:\n- {name: a}\n- {name: a}\n",
		"a: &a [*a]\ninterfaces: *a\n", "interfaces: &x\n- *x\n", ibEth0 + "interfaces:\n- {name: a}\n- {name: b}\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<12 {
			return
		}
		all, err := severalOf(b)
		if err != nil {
			forPeople(t, err)
			return
		}
		names := map[string]bool{}
		for _, c := range all {
			if names[c.Name] {
				t.Errorf("two interfaces are %s", c.Name)
			}
			names[c.Name] = true
		}
	})
}
