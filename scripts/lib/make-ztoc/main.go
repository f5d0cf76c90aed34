// Writes the SOCI ztoc of a gzipped layer, by the library of the soci snapshotter.
//
//	make-ztoc LAYER SPAN OUT     with spans of SPAN bytes
package main

import (
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/awslabs/soci-snapshotter/ztoc"
)

func main() {
	if len(os.Args) != 4 {
		fail(fmt.Errorf("usage: make-ztoc LAYER SPAN OUT"))
	}
	span, err := strconv.ParseInt(os.Args[2], 10, 64)
	fail(err)
	built, err := ztoc.NewBuilder("make-ztoc").BuildZtoc(os.Args[1], span)
	fail(err)
	packed, _, err := ztoc.Marshal(built)
	fail(err)
	bytes, err := io.ReadAll(packed)
	fail(err)
	fail(os.WriteFile(os.Args[3], bytes, 0o644))
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "make-ztoc:", err)
		os.Exit(1)
	}
}
