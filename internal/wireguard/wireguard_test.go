package wireguard

import (
	"bufio"
	"context"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
)

// The other end is told what wg(8) would tell it, and its refusal is an error.
func TestConfigure(t *testing.T) {
	keys, err := TestKeys()
	if err != nil {
		t.Fatal(err)
	}
	for _, answer := range []string{"errno=0\n\n", "errno=22\n\n"} {
		name := filepath.Join(t.TempDir(), "s")
		ln, err := net.Listen("unix", name)
		if err != nil {
			t.Skip(err)
		}
		got := make(chan string, 1)
		go func() {
			defer ln.Close()
			c, err := ln.Accept()
			if err != nil {
				got <- err.Error()
				return
			}
			defer c.Close()
			var text strings.Builder
			for s := bufio.NewScanner(c); s.Scan() && s.Text() != ""; {
				text.WriteString(s.Text() + "\n")
			}
			c.Write([]byte(answer))
			got <- text.String()
		}()
		err = Configure(context.Background(), name, keys[0],
			Peer{keys[1].PublicKey(), netip.MustParseAddrPort("[fd00::2]:51820"), netip.MustParsePrefix("fd99::2/128")})
		if (err == nil) != (answer == "errno=0\n\n") {
			t.Errorf("after %q: %v", answer, err)
		}
		text := <-got
		for _, want := range []string{"set=1\nprivate_key=0000", "\nendpoint=[fd00::2]:51820\n",
			"\nallowed_ip=fd99::2/128\n"} {
			if !strings.Contains(text, want) {
				t.Errorf("%q lacks %q", text, want)
			}
		}
	}
}
