package interop

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
)

// TestSIWProbe: "ipoibcmd probe mpa" as a process, at both ends of a connection
// with kernel siw.
func TestSIWProbe(t *testing.T) {
	w := openSIW(t, "siw-p2p")
	program := filepath.Join(t.TempDir(), "ipoibcmd")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", program,
		"ipoibcm/cmd/ipoibcmd").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	start := func(args ...string) (c *exec.Cmd, out *bytes.Buffer, stderr *bufio.Reader) {
		t.Helper()
		c, out = exec.CommandContext(t.Context(), program,
			append([]string{"probe", "mpa", "--json", "--hold", "1s"}, args...)...), new(bytes.Buffer)
		c.Stdout = out
		pipe, err := c.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := w.host.Start(c); err != nil {
			t.Fatal(err)
		}
		return c, out, bufio.NewReader(pipe)
	}
	told := func(c *exec.Cmd, out *bytes.Buffer) (p control.MPAProbe) {
		t.Helper()
		err := c.Wait()
		switch jerr := json.Unmarshal(out.Bytes(), &p); {
		case jerr != nil:
			t.Fatalf("%v", jerr)
		case err != nil:
			t.Fatalf("%v", err)
		case p.Outcome != "established":
			t.Fatalf("Outcome is %v, want \"established\"", p.Outcome)
		}
		return p
	}
	t.Run("to a server", func(t *testing.T) {
		server, err := w.vm.Start("rping", "-s", "-a", guestIPv4, "-p", fmt.Sprint(siwPort))
		if err != nil {
			t.Fatal(err)
		}
		defer server.Kill()
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if out, err := w.vm.Sh(patience, "netstat -tln"); err == nil && strings.Contains(out, fmt.Sprintf(":%d ", siwPort)) {
				break
			}
		}
		c, out, _ := start(fmt.Sprintf("%s:%d", guestIPv4, siwPort), "--peer-to-peer", "--ird", "4", "--ord", "3")
		p := told(c, out)
		// siw takes the two depths crosswise and names its choice of RTR.
		expect.Equal(t, p.Settled.RTR, "write", "RTR")
		expect.Equal(t, p.Settled.ORD, 3, "ORD")
		expect.Equal(t, p.Settled.IRD, 4, "IRD")
		expect.MustEqual(t, len(p.Frames), 2, "length of Frames")
		expect.Equal(t, strings.Join(p.Frames[1].Enhanced.RTR, "+"), "write", "RTR of the reply")
	})
	t.Run("from a client", func(t *testing.T) {
		c, out, stderr := start("--listen", fmt.Sprintf("%s:%d", hostIPv4, siwPort))
		if l, err := stderr.ReadString('\n'); !strings.HasPrefix(l, "listening on") {
			t.Fatalf("%q, %v", l, err)
		}
		client, err := w.vm.Start("rping", "-c", "-a", hostIPv4, "-p", fmt.Sprint(siwPort), "-C", "1")
		if err != nil {
			t.Fatal(err)
		}
		defer client.Kill()
		p := told(c, out)
		expect.Equal(t, p.Settled.RTR, "write", "RTR")
		expect.Equal(t, p.FirstMessage, "RTR indication: Write of 0 octets", "FirstMessage")
		expect.Equal(t, *p.Frames[0].Enhanced.IRD, 1, "IRD of the request")
	})
}
