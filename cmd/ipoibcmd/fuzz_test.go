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
		"", "underlay: eth0\n", "underlay: eth0\nname: averyveryverylongname0\n", "mode: [rc]\n", "ud_mtu: -1\nunderlay: e\n", "peers: [fe80::1]\n",
		"pkey: 0x8001\nqkey: 0xffffffff\nunderlay: eth0\n", "idle_timeout: -5s\nunderlay: eth0\n", "a: &a [*a]\n", "offload: {gso: maybe}\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<16 {
			return
		}
		c := defaults()
		err := c.decode(b)
		var s settings
		if err == nil {
			s, err = c.settings()
		}
		if err != nil {
			if text := err.Error(); text == "" || strings.Contains(text, "panic") || strings.Contains(text, "main.") {
				t.Errorf("error %q", text)
			}
			return
		}
		if c.Underlay == "" || c.Name == "" || len(c.Name) > 15 || c.UDMTU.most() < 68 || c.ReceiveMTU < c.UDMTU.most() {
			t.Errorf("accepted %+v, settings %+v", c, s)
		}
	})
}
