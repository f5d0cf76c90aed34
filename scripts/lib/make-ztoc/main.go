// Makes what other programs publish with a layer, by their own libraries.
//
//	make-ztoc LAYER SPAN OUT            the SOCI ztoc of a gzipped layer, with spans of SPAN bytes
//	make-ztoc estargz TAR CHUNK OUT     an eStargz layer with chunks of CHUNK bytes; prints the digest of its TOC
package main

import (
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/awslabs/soci-snapshotter/ztoc"
	"github.com/containerd/stargz-snapshotter/estargz"
)

func main() {
	args := os.Args[1:]
	isEstargz := len(args) > 0 && args[0] == "estargz"
	if isEstargz {
		args = args[1:]
	}
	if len(args) != 3 {
		fail(fmt.Errorf("usage: make-ztoc [estargz] LAYER LENGTH OUT"))
	}
	length, err := strconv.ParseInt(args[1], 10, 64)
	fail(err)
	if isEstargz {
		makeEstargz(args[0], int(length), args[2])
	} else {
		makeZtoc(args[0], length, args[2])
	}
}

func makeZtoc(layer string, span int64, out string) {
	built, err := ztoc.NewBuilder("make-ztoc").BuildZtoc(layer, span)
	fail(err)
	packed, _, err := ztoc.Marshal(built)
	fail(err)
	bytes, err := io.ReadAll(packed)
	fail(err)
	fail(os.WriteFile(out, bytes, 0o644))
}

func makeEstargz(archive string, chunk int, out string) {
	file, err := os.Open(archive)
	fail(err)
	info, err := file.Stat()
	fail(err)
	blob, err := estargz.Build(io.NewSectionReader(file, 0, info.Size()), estargz.WithChunkSize(chunk))
	fail(err)
	bytes, err := io.ReadAll(blob)
	fail(err)
	fail(blob.Close())
	fail(os.WriteFile(out, bytes, 0o644))
	fmt.Println(blob.TOCDigest())
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "make-ztoc:", err)
		os.Exit(1)
	}
}
