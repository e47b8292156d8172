#!/bin/sh
# HALP beside SGD on CIFAR-10 (docs/halp.md): sh docs/halp-cifar10.sh CIFAR10-FOLDER [SEEDS], on a machine with a GPU.
# Leaves a run for each rule and seed under runs/halp-cifar10/, and prints them beside each other.
set -eu
data=$1
seeds=${2:-"0 1 2"}
out=runs/halp-cifar10
train() {
    name=$1
    shift
    for seed in $seeds; do
        lockstep train docs/halp-cifar10.toml --out "$out/$name-$seed" --set "data.path=$data" --set "train.seed=$seed" "$@"
    done
}
train sgd-fp32
train sgd-fp16 --set precision.compute=fp16
train sgd-fp32-plain --set optim.momentum=0.0
train svrg --set optim.name=svrg
train halp-8 --set optim.name=halp --set optim.bits=8 --set optim.mu=10.0
train halp-16 --set optim.name=halp --set optim.bits=16 --set optim.mu=10.0
lockstep compare "$out"/*
