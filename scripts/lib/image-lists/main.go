// Makes lists of the files of image layers, by the libraries of the programs that publish them.
//
//	image-lists ztoc LAYER SPAN OUT     writes the SOCI ztoc of the gzipped LAYER, with spans of SPAN bytes
//	image-lists estargz TAR CHUNK OUT   writes TAR as an eStargz layer, and prints the digest of its TOC
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
	if len(os.Args) != 5 {
		fail(fmt.Errorf("usage: image-lists ztoc|estargz FILE BYTES OUT"))
	}
	file, out := os.Args[2], os.Args[4]
	length, err := strconv.Atoi(os.Args[3])
	fail(err)
	switch os.Args[1] {
	case "ztoc":
		fail(writeZtoc(file, int64(length), out))
	case "estargz":
		fail(writeEstargz(file, length, out))
	default:
		fail(fmt.Errorf("unknown list %s", os.Args[1]))
	}
}

func writeZtoc(layer string, span int64, out string) error {
	built, err := ztoc.NewBuilder("image-lists").BuildZtoc(layer, span)
	if err != nil {
		return err
	}
	packed, _, err := ztoc.Marshal(built)
	if err != nil {
		return err
	}
	return write(out, packed)
}

func writeEstargz(file string, chunk int, out string) error {
	archive, err := os.Open(file)
	if err != nil {
		return err
	}
	defer archive.Close()
	info, err := archive.Stat()
	if err != nil {
		return err
	}
	section := io.NewSectionReader(archive, 0, info.Size())
	blob, err := estargz.Build(section, estargz.WithChunkSize(chunk))
	if err != nil {
		return err
	}
	defer blob.Close()
	if err := write(out, blob); err != nil {
		return err
	}
	fmt.Println(blob.TOCDigest())
	return nil
}

func write(path string, content io.Reader) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	if _, err := io.Copy(file, content); err != nil {
		return err
	}
	return file.Close()
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "image-lists:", err)
		os.Exit(1)
	}
}
