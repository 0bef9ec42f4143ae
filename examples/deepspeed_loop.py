"""The article's whole road in one script, for people who keep their own loop: data, model, optimizer, DeepSpeed's
configuration, training with evaluation, saving.

    python examples/deepspeed_loop.py --data-path corpus.jsonl --tokenizer tokenizer --output out
    torchrun --nproc-per-node 2 examples/deepspeed_loop.py …
    deepspeed --num_gpus 2 examples/deepspeed_loop.py …          (on a CPU: --num_accelerators 2)

Run again after a crash, it goes on from the last finished epoch.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    default_data_collator,
    get_cosine_schedule_with_warmup,
)

from arriero.data import create_pretrain_dataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", nargs="+", required=True, help="text: files, folders, globs, prepared datasets")
    parser.add_argument("--data-split", default="99,1", help="training, evaluation, and what is held out of both")
    parser.add_argument("--data-output-path", default="cache")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--model-name-or-path", help="continue this Hugging Face folder instead of a new small model")
    parser.add_argument("--output", required=True)
    parser.add_argument("--max-seq-len", type=int, default=256)
    parser.add_argument("--per-device-train-batch-size", type=int, default=4)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--num-train-epochs", type=int, default=1)
    parser.add_argument("--max-steps-per-epoch", type=int, help="stop an epoch early, to try things out")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--zero-stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "-1")))
    return parser.parse_args()


def start(local_rank: int) -> None:
    """Meet the other ranks; alone (local_rank −1), DeepSpeed still wants a group of one."""
    if local_rank == -1:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        store = dist.HashStore()
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=store, rank=0, world_size=1)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def build_model(args: argparse.Namespace, tokenizer) -> torch.nn.Module:
    if args.model_name_or_path:
        return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    torch.manual_seed(args.seed)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.max_seq_len,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def deepspeed_config(args: argparse.Namespace) -> dict:
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": args.bf16},
        # Add micro-batches up in fp32 whatever the precision.
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay, norms and biases don't."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def sum_over_ranks(*values: float) -> list[float]:
    numbers = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(numbers)
    return numbers.tolist()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def to_device(batch: dict) -> dict:
    return {key: value.to(device()) for key, value in batch.items()}


def targets(batch: dict) -> int:
    """Tokens that the loss counts: the model shifts the labels, so the first of a row is no target."""
    return int((batch["labels"][:, 1:] != -100).sum())


def train_epoch(engine, loader: DataLoader, args: argparse.Namespace) -> float:
    """One epoch; returns its loss: the sum over the target tokens of all ranks, divided by their number."""
    engine.train()
    steps = len(loader) // args.gradient_accumulation_steps
    steps = min(steps, args.max_steps_per_epoch or steps)
    batches, loss_sum, target_sum = iter(loader), 0.0, 0.0
    for _ in range(steps):
        window = [to_device(next(batches)) for _ in range(args.gradient_accumulation_steps)]
        (counted,) = sum_over_ranks(sum(targets(batch) for batch in window))
        for batch in window:
            # sum of the losses / targets of the whole step: equal weight for every token, however rows are spread.
            # DeepSpeed averages over ranks and accumulation, hence the factor.
            factor = dist.get_world_size() * args.gradient_accumulation_steps
            loss = engine(**batch, num_items_in_batch=torch.tensor(counted / factor), use_cache=False).loss
            engine.backward(loss)
            engine.step()
            loss_sum += float(loss) * counted / factor
        target_sum += counted
    (loss_sum,) = sum_over_ranks(loss_sum)
    return loss_sum / target_sum


@torch.no_grad()
def evaluate(engine, dataset, args: argparse.Namespace) -> float:
    """Loss on every evaluation row exactly once: no row is repeated to even the ranks out."""
    engine.eval()
    rank, size, total = dist.get_rank(), dist.get_world_size(), len(dataset)
    mine = list(range(rank, total, size))
    extra = -(-total // size) - len(mine)  # rows without labels, so that ZeRO-3's ranks stay in step
    loader = DataLoader(Subset(dataset, mine + [0] * extra), batch_size=1, collate_fn=default_data_collator)
    loss_sum = target_sum = 0.0
    for number, batch in enumerate(loader):
        batch = to_device(batch)
        if number >= len(mine):
            batch["labels"] = torch.full_like(batch["labels"], -100)
        counted = targets(batch)
        loss = engine(**batch, num_items_in_batch=torch.tensor(1.0), use_cache=False).loss
        loss_sum += float(loss) if counted else 0.0
        target_sum += counted
    loss_sum, target_sum = sum_over_ranks(loss_sum, target_sum)
    return loss_sum / target_sum


def save_model(engine, tokenizer, args: argparse.Namespace) -> None:
    """The trained model as a Hugging Face folder, whatever the ZeRO stage."""
    import deepspeed

    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=args.zero_stage == 3):
            if dist.get_rank() == 0:
                weights[name] = parameter.detach().cpu().clone()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(f"{args.output}/final", state_dict=weights)
        tokenizer.save_pretrained(f"{args.output}/final")


def main() -> None:
    args = parse_args()
    local_rank = args.local_rank
    start(local_rank)
    import deepspeed  # after the group stands: DeepSpeed looks for an accelerator when it is imported

    if not torch.cuda.is_available():
        # Else DeepSpeed compiles an op for CPU inference (needs ninja and a compiler, 22 s) that training never calls.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    train_dataset, eval_dataset = create_pretrain_dataset(
        local_rank,
        args.data_path,
        args.data_split,
        args.data_output_path,
        args.seed,
        tokenizer,
        args.max_seq_len,
    )
    if local_rank == -1:
        train_sampler = RandomSampler(train_dataset, generator=torch.Generator().manual_seed(args.seed))
    else:
        train_sampler = DistributedSampler(train_dataset, seed=args.seed, drop_last=True)
    loader = DataLoader(
        train_dataset,
        collate_fn=default_data_collator,
        sampler=train_sampler,
        batch_size=args.per_device_train_batch_size,
        drop_last=True,
    )
    steps = len(loader) // args.gradient_accumulation_steps * args.num_train_epochs

    model = build_model(args, tokenizer)
    # torch's own AdamW: with DeepSpeed's a resumed run drifts from an unbroken one.
    optimizer = torch.optim.AdamW(
        decay_groups(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95), fused=True
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, steps // 50), max(1, steps))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=deepspeed_config(args), dist_init_required=False
    )
    _, client_state = engine.load_checkpoint(args.output) if Path(args.output, "latest").exists() else (None, None)
    first_epoch = client_state["epoch"] + 1 if client_state else 0

    for epoch in range(first_epoch, args.num_train_epochs):
        if isinstance(train_sampler, DistributedSampler):
            train_sampler.set_epoch(epoch)  # forgotten, every epoch has the same order
        else:
            train_sampler.generator.manual_seed(args.seed + epoch)
        train_loss = train_epoch(engine, loader, args)
        eval_loss = evaluate(engine, eval_dataset, args)
        engine.save_checkpoint(args.output, tag=f"epoch-{epoch}", client_state={"epoch": epoch})
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {train_loss:.4f}, perplexity {math.exp(eval_loss):.2f}", flush=True)
    save_model(engine, tokenizer, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # All is written. On CPUs gloo's threads may still abort a rank while Python takes itself apart (torch 2.13).
    sys.stdout.flush()
    os._exit(0)
