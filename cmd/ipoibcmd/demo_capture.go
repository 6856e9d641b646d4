package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"sync"

	"ipoibcm/control"
)

// captureSnap keeps CM messages whole (328 octets and Ethernet), and the beginning of bulk data.
const captureSnap = 400

// A demoCapture captures the packets of both agents for a while. The stream of each agent becomes a section
// of the file: pcapng sections may follow one another.
type demoCapture struct {
	stop  context.CancelFunc
	wg    sync.WaitGroup
	files [2]string
}

// startCapture starts to capture the packets of both agents, if a capture file is wanted and no capture
// runs.
func (d *demoRun) startCapture() {
	if d.dump == nil || d.capture != nil {
		return
	}
	ctx, stop := context.WithCancel(d.ctx)
	c := &demoCapture{stop: stop}
	for i, a := range d.agent {
		c.files[i] = d.path(i, ".pcapng")
		body, err := a.Stream(ctx, fmt.Sprintf("%s?snap=%d", control.PathCapture, captureSnap))
		if err != nil {
			continue
		}
		f, err := os.Create(c.files[i])
		if err != nil {
			body.Close()
			continue
		}
		// Peek waits for the section header, which the agent sends once its tap is in place.
		in := bufio.NewReader(body)
		in.Peek(1)
		c.wg.Go(func() {
			defer f.Close()
			defer body.Close()
			copyBlocks(f, in) // ends when stopped
		})
	}
	d.capture = c
}

// stopCapture ends the capture, if one runs, and appends what was captured to the file.
func (d *demoRun) stopCapture() {
	c := d.capture
	if c == nil {
		return
	}
	d.capture = nil
	c.stop()
	c.wg.Wait()
	for _, name := range c.files {
		if f, err := os.Open(name); err == nil {
			io.Copy(d.dump, f)
			f.Close()
			os.Remove(name)
		}
	}
}
